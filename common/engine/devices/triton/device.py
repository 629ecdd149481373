"""A GPU as a `Device`, by Triton kernels; or the CPU, under Triton's interpreter.

Imports triton: import this module only where the triton path was chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from common.checkpoint import CheckpointError
from common.checkpoint.layers import Activation, AttentionOptions, Experts
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.device import (
    Capture,
    CompiledRun,
    ExpertWeights,
    GroupedMlp,
    Layer,
    Linear,
    Memory,
    Mlp,
    Tail,
)
from common.engine.contract.experts import torch_experts
from common.engine.devices.triton.capture import CudaCapture
from common.engine.devices.triton.cuda_memory import CudaMemory
from common.engine.devices.triton.decode_attention import decode_attention
from common.engine.devices.triton.device_draws import TritonDraws
from common.engine.devices.triton.elementwise import TritonElementwise
from common.engine.devices.triton.grouped_product import TritonExperts
from common.engine.devices.triton.latent_attention import latent_decode_attention, latent_prefill_attention
from common.engine.devices.triton.latent_write import rope_and_write_latent
from common.engine.devices.triton.launch import require_runnable
from common.engine.devices.triton.prefill_attention import prefill_attention
from common.engine.devices.triton.rope_write import rope_and_write
from common.engine.devices.triton.tuning import AttentionTiles, TuningFile, tune_attention
from common.values.config import Quantization

SHORT_QUERY_LEN = 64  # up to here the prefill kernel has smaller tiles, which are not tuned


class TritonAttention:
    """`AttentionBackend` by Triton kernels; everything runs on the current stream of q's device."""

    def __init__(self) -> None:
        """Raises RuntimeError where kernels cannot run."""
        require_runnable()
        self.tiles = AttentionTiles()  # the kernels' own choice

    def rope_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots (below 0: not written); returns the rotated q."""
        return rope_and_write(q, k, v, cos_sin, batch.positions, kv, batch.slot_mapping)

    def rope_and_write_latent(
        self, q: torch.Tensor, latent: torch.Tensor, cos_sin: torch.Tensor, kv: LayerKV, batch: AttentionBatch
    ) -> torch.Tensor:
        """As `AttentionBackend.rope_and_write_latent` (below 0: not written)."""
        return rope_and_write_latent(q, latent, cos_sin, batch.positions, kv, batch.slot_mapping)

    def attend(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A step of single tokens splits the keys over programs; any other mix goes through the prefill kernel."""
        parts = (q, kv, batch, options.scale)
        if options.latent_rank:
            kernel = latent_decode_attention if batch.max_query_len <= 1 else latent_prefill_attention
            return kernel(*parts, options.latent_rank)
        tuned, window, soft_cap = self.tiles, options.window, options.soft_cap
        if batch.max_query_len <= 1:
            return decode_attention(*parts, window=window, soft_cap=soft_cap, sinks=sinks, tiles=tuned.decode)
        tiles = tuned.prefill if batch.max_query_len > SHORT_QUERY_LEN else None
        return prefill_attention(*parts, window=window, soft_cap=soft_cap, sinks=sinks, tiles=tiles)


class TritonDevice:
    """`Device`. Under the interpreter its place is the CPU."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization = "none") -> None:
        """Raises RuntimeError where kernels cannot run, CheckpointError when weights should have fewer bits."""
        if quantization != "none":
            raise CheckpointError(
                f"quantization={quantization} is not offered by attention=triton or on GPUs, only on CPUs"
            )
        self.place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.memory: Memory | None = CudaMemory() if self.place.type == "cuda" else None
        self.dtype = dtype
        self.draws = TritonDraws()
        self.attention = TritonAttention()
        self.elementwise = TritonElementwise()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, min_bits: int = 4) -> Linear:
        """By torch, that is by cuBLAS."""
        return Linear(weight.shape[1], weight.shape[0], partial(F.linear, weight=weight, bias=bias))

    def grouped_mlp(self, experts: Experts, activation: Activation, weights: Iterable[ExpertWeights]) -> GroupedMlp:
        """By our own kernel, of stacked weights, copied in one after another; torch computes what it cannot."""
        if experts.has_biases or activation != "silu":
            return torch_experts([*map(self._mlp, weights)], self.elementwise, activation)
        stacks: list[torch.Tensor] = []
        for idx, (*parts, _, _) in enumerate(weights):
            stacks = stacks or [part.new_empty((experts.routing.num_experts, *part.shape)) for part in parts]
            for stack, part in zip(stacks, parts, strict=True):
                stack[idx].copy_(part)
        gate_up, down = stacks
        return GroupedMlp(TritonExperts(gate_up, down))

    def _mlp(self, weights: ExpertWeights) -> Mlp:
        gate_up, down, gate_up_bias, down_bias = weights
        return Mlp(self.linear(gate_up, gate_up_bias), self.linear(down, down_bias))

    def compile(self, layers: Sequence[Layer], tail: Tail) -> Mapping[int, CompiledRun]:
        """None: steps are recorded as a whole instead, see `new_capture`."""
        return {}

    def tune(self, kv: LayerKV, num_heads: int, head_dim: int) -> None:
        if self.place.type == "cuda" and len(kv) > 1:  # of latents nothing is tuned
            file = TuningFile.of_device(torch.cuda.get_device_name())
            self.attention.tiles = tune_attention(file, kv, num_heads, head_dim, self.dtype)

    def new_capture(self) -> Capture | None:
        return CudaCapture() if self.place.type == "cuda" else None
