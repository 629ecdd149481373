"""Runs a decoder's layers as one compiled step, where all of them are of the kind that it knows."""

from collections.abc import Callable, Sequence

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.devices.cpu.native.stack import NativeStack, StackLayer, StackShape
from common.engine.model.layers import DecoderLayer, RmsNorm
from common.engine.model.linear import Linear


class FusedStack:
    """Immutable. bfloat16 on CPUs that have products for it."""

    def __init__(self, stack: NativeStack, num_layers: int) -> None:
        self._stack = stack
        self._num_layers = num_layers

    def can_run(self, kv: Sequence[torch.Tensor]) -> bool:
        """Whether the KV cache is a plain one."""
        return kv[0].dtype == torch.bfloat16

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] bfloat16, overwritten
        batch: AttentionBatch,
        kv: Sequence[torch.Tensor],
        logit_rows: torch.Tensor,
        layer_hook: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """As `Decoder.forward`, from the embedding's output on."""
        step = self._stack.start(hidden, batch, kv, logit_rows)
        done = 0
        for layer_idx in range(self._num_layers if layer_hook is not None else 0):
            written = 2 * layer_idx + 1
            step.run(done, written)
            done = written
            assert layer_hook is not None
            layer_hook(layer_idx + 1)
        step.run(done, 2 * self._num_layers - (0 if logit_rows.numel() else 1))
        return step.logits


def fused_stack(
    layers: Sequence[object], norm: RmsNorm, head: Linear, products: NativeProducts | None
) -> FusedStack | None:
    """None where a layer is of another kind, attends in a way that is not plain, or has a weight that is not packed."""
    plain = [layer for layer in layers if isinstance(layer, DecoderLayer) and layer.options.is_plain]
    if products is None or head.product is None or len(plain) < len(layers):
        return None
    converted = [_convert(layer) for layer in plain]
    known = [layer for layer in converted if layer is not None]
    if len(known) < len(layers):
        return None
    first = plain[0]
    heads = first.shape.num_heads, first.shape.num_kv_heads, first.shape.head_dim
    sizes = first.qkv.in_features, first.mlp.down.in_features
    shape = StackShape(*sizes, *heads, first.input_norm.eps, first.options.scale)
    stack = NativeStack(products.library, shape, known, norm.weight, head.product, first.cos_sin)
    return FusedStack(stack, len(layers))


def _convert(layer: DecoderLayer) -> StackLayer | None:
    qkv, output = layer.qkv.product, layer.output.product
    gate_up, down = layer.mlp.gate_up.product, layer.mlp.down.product
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    q_norm, k_norm = (norm.weight if norm is not None else None for norm in (layer.q_norm, layer.k_norm))
    return StackLayer(layer.input_norm.weight, layer.post_norm.weight, q_norm, k_norm, qkv, output, gate_up, down)
