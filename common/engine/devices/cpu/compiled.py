"""Which layers the compiled step computes, by their values, and one call for each run of them."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from common.checkpoint.layers import PRE_NORMS, LayerSpec, Routing
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.device import CompiledRun, Layer, Tail
from common.engine.contract.executor import LayerHook
from common.engine.devices.cpu.native.experts import is_packed
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.devices.cpu.native.stack import NativeStack


def compile_layers(layers: Sequence[Layer], tail: Tail, products: NativeProducts) -> Mapping[int, CompiledRun]:
    """The longest runs of layers that are known and alike, by the number of their first layer."""
    runs: dict[int, CompiledRun] = {}
    done = 0
    for spec, group in groupby(layers, key=lambda layer: layer.spec if is_known(layer) else None):
        run = list(group)
        if spec is not None:
            has_tail = is_known_tail(tail, spec) and done + len(run) == len(layers)
            runs[done] = NativeRun(NativeStack(products.library, run, tail if has_tail else None))
        done += len(run)
    return runs


def is_known_tail(tail: Tail, last: LayerSpec) -> bool:
    """Whether `stack.h` makes logits of what the last layer gives: plain ones, by a packed head."""
    has_plain_logits = tail.logit_scale == 1 and not tail.logit_soft_cap
    return tail.head.packed is not None and tail.norm_eps == last.norm_eps and has_plain_logits


def is_known(layer: Layer) -> bool:
    """Whether `stack.h` computes such a layer: pre-norms, plain attention, weights that are packed."""
    spec = layer.spec
    is_llama_like = spec.norms == PRE_NORMS and spec.qk_norm in ("none", "head") and spec.activation == "silu"
    has_plain_attention = spec.attention.is_plain and not spec.has_sinks and spec.latent is None
    has_packed = all(one.packed is not None for one in (layer.qkv, layer.output)) and is_packed(layer.mlp)
    chooses_alike = spec.experts is None or _is_known_choice(spec.experts.routing)
    return is_llama_like and has_plain_attention and spec.residual_scale == 1 and chooses_alike and has_packed


def _is_known_choice(routing: Routing) -> bool:
    """Whether `experts.h` chooses as it says: by the scores alone, among all experts."""
    return not routing.has_choice_bias and routing.num_groups == 1


class NativeRun:
    """`CompiledRun`. Immutable; bfloat16 on CPUs that have products for it."""

    def __init__(self, stack: NativeStack) -> None:
        self._stack = stack
        self.num_layers = stack.num_layers
        self.has_tail = stack.has_tail

    def can_run(self, kv: LayerKV) -> bool:
        """Whether the KV cache is a plain one."""
        return kv[0].dtype == torch.bfloat16

    def forward(
        self,
        hidden: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        rows: torch.Tensor | None,
        layer_hook: LayerHook | None,
    ) -> torch.Tensor:
        """As `CompiledRun.forward`."""
        step = self._stack.start(hidden, batch, kv, rows)
        done = 0
        for layer_idx in range(self.num_layers if layer_hook is not None else 0):
            written = 2 * layer_idx + 1
            step.run(done, written)
            done = written
            assert layer_hook is not None
            layer_hook(layer_idx + 1)
        has_rows = rows is None or rows.numel() > 0
        step.run(done, 2 * self.num_layers - (0 if has_rows else 1))
        return step.result()
