"""A decoder-only model: embedding, layers, final norm, head. Architectures differ in their `build_layer`.

A new architecture is one file with a `build_layer` and an entry in LAYER_BUILDERS.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from common.checkpoint import CheckpointError, ModelSpec
from common.engine.contract.attention import AttentionBackend, AttentionBatch, AttentionOptions
from common.engine.contract.elementwise import Elementwise, TorchElementwise
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.model import llama, qwen2, qwen3
from common.engine.model.fused import FusedStack, fused_stack
from common.engine.model.layers import LayerInputs, RmsNorm
from common.engine.model.linear import Linear
from common.engine.model.rope import cos_sin_table
from common.engine.model.weights import Weights

LayerHook = Callable[[int], None]


class Layer(Protocol):
    """What the decoder needs of a layer; see `DecoderLayer`."""

    def write_kv(self, hidden: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor: ...

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor: ...

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor: ...


LayerBuilder = Callable[[LayerInputs, str], Layer]
LAYER_BUILDERS: dict[str, LayerBuilder] = {
    "llama": llama.build_layer,
    "qwen2": qwen2.build_layer,
    "qwen3": qwen3.build_layer,
}


class Decoder:
    """Immutable once built. Not thread-safe only where its attention backend is not."""

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: RmsNorm,
        head: Linear,
        fused: FusedStack | None = None,
    ) -> None:
        self._embedding = embedding  # [vocab_size, hidden_size]
        self._layers = layers
        self._norm = norm
        self._head = head
        self._fused = fused

    @property
    def is_fused(self) -> bool:
        """Whether steps over a plain KV cache are one compiled call."""
        return self._fused is not None

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        batch: AttentionBatch,
        kv: Sequence[torch.Tensor],  # per layer [2, num_blocks, block_size, num_kv_heads, head_dim]
        logit_rows: torch.Tensor,  # [num_rows] int64: the tokens whose logits are wanted
        layer_hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """Logits [num_rows, vocab_size] float32. Writes KV of every token; `layer_hook(n)` follows layer n - 1's.

        In the last layer only the wanted rows are computed past attention, and nothing when none is wanted.
        """
        hidden = F.embedding(token_ids, self._embedding)
        if self._fused is not None and self._fused.can_run(kv):
            return self._fused.forward(hidden, batch, kv, logit_rows, layer_hook)
        for layer_idx, layer in enumerate(self._layers):
            q = layer.write_kv(hidden, kv[layer_idx], batch)
            if layer_hook is not None:
                layer_hook(layer_idx + 1)
            is_last = layer_idx + 1 == len(self._layers)
            if is_last and logit_rows.numel() == 0:
                return hidden.new_empty((0, self._head.out_features), dtype=torch.float32)
            attended = layer.attend(q, kv[layer_idx], batch)
            if is_last:
                attended, hidden = attended[logit_rows], hidden[logit_rows]
            hidden = layer.finish(attended, hidden)
        return self._head(self._norm(hidden)).float()


def build_decoder(
    spec: ModelSpec,
    weights: Weights,
    backend: AttentionBackend,
    device: torch.device | str,
    ops: Elementwise | None = None,
    products: NativeProducts | None = None,
) -> Decoder:
    """Read all weights and prepare them for `device`. Raises CheckpointError on a missing or unused weight.

    `ops` = None is torch's; `products` = None leaves bfloat16 weights to torch.
    """
    ops = ops or TorchElementwise()
    if spec.architecture not in LAYER_BUILDERS:
        raise CheckpointError(f"architecture {spec.architecture!r} is not one of {', '.join(LAYER_BUILDERS)}")
    build_layer = LAYER_BUILDERS[spec.architecture]
    shared = (backend, cos_sin_table(spec, device), ops, products)
    inputs = [LayerInputs(spec, weights, attention_options(spec, idx), *shared) for idx in range(spec.num_layers)]
    embedding = weights.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    layers = [build_layer(of_layer, f"model.layers.{idx}") for idx, of_layer in enumerate(inputs)]
    norm = RmsNorm(weights.take("model.norm.weight", (spec.hidden_size,)), spec.rms_norm_eps, ops)
    head = embedding if spec.tie_embeddings else weights.take("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    weights.check_all_taken()
    head_linear = Linear(head, None, products.for_head() if products else None)
    return Decoder(embedding, layers, norm, head_linear, fused_stack(layers, norm, head_linear, products))


def attention_options(spec: ModelSpec, layer_idx: int) -> AttentionOptions:
    """How one layer of a model attends."""
    window = spec.windows[layer_idx] if spec.windows else 0
    return AttentionOptions(spec.head_dim**-0.5, window, spec.attention_soft_cap)
