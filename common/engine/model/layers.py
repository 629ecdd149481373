"""The parts that decoder models are composed of. A new architecture picks from these or brings its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.checkpoint import ModelSpec
from common.engine.contract.attention import AttentionBackend, AttentionBatch, AttentionOptions
from common.engine.contract.elementwise import Elementwise
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.model.linear import Linear
from common.engine.model.weights import Weights


class RmsNorm:
    """x / rms(x) * weight over the last axis."""

    def __init__(self, weight: torch.Tensor, eps: float, ops: Elementwise) -> None:
        self.weight = weight
        self.eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Elementwise) -> None:
        self.gate_up = gate_up
        self.down = down
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How a fused q, k, v product is cut into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "AttentionShape":
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> q, k, v as [num_tokens, heads, head_dim] views."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        return torch.split_with_sizes(heads, (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and gated MLP, in two halves so that KV can leave before attention is computed."""

    shape: AttentionShape
    options: AttentionOptions
    backend: AttentionBackend
    cos_sin: torch.Tensor  # [max_position, head_dim] float32
    input_norm: RmsNorm
    qkv: Linear
    output: Linear
    post_norm: RmsNorm
    mlp: GatedMlp
    q_norm: RmsNorm | None = None  # Qwen3: over each head, before RoPE
    k_norm: RmsNorm | None = None

    def write_kv(self, hidden: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Write K and V of all tokens; returns the rotated queries."""
        q, k, v = self.shape.split(self.qkv(self.input_norm(hidden)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.backend.rope_and_write(q, k, v, self.cos_sin, kv, batch)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """[num_tokens, num_heads * head_dim]"""
        return self.backend.attend(q, kv, batch, self.options).flatten(1)

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP, row by row; returns the layer's output."""
        normed, hidden = self.post_norm.add(self.output(attended), hidden)
        return hidden.add_(self.mlp(normed))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every `build_layer` gets: the model's shape, its weights, how this layer attends, what all layers share."""

    spec: ModelSpec
    weights: Weights
    options: AttentionOptions
    backend: AttentionBackend
    cos_sin: torch.Tensor  # [max_position, head_dim] float32
    ops: Elementwise
    products: NativeProducts | None = None  # what bfloat16 weights are packed for, if anything


def linear(inputs: LayerInputs, weight: torch.Tensor) -> Linear:
    """A product without bias."""
    return Linear(weight, None, inputs.products)


def fused_linear(inputs: LayerInputs, name_to_size: Mapping[str, int], in_size: int, *, bias: bool) -> Linear:
    """Several projections of the same input as one product; its output holds them in the order given."""
    parts = [inputs.weights.take(f"{name}.weight", (size, in_size)) for name, size in name_to_size.items()]
    biases = [inputs.weights.take(f"{name}.bias", (size,)) for name, size in name_to_size.items() if bias]
    return Linear(torch.cat(parts), torch.cat(biases) if bias else None, inputs.products)
