"""Which layers are given to the compiled step: every field that it does not compute keeps a layer out. Runs nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from common.checkpoint.layers import POST_NORMS, AttentionOptions, Experts, Latent, LayerSpec, Routing
from common.checkpoint.rope import Rope
from common.engine.contract.device import ExpertMlp, GroupedMlp, Layer, Linear, Mlp, Tail
from common.engine.devices.cpu.compiled import is_known, is_known_tail
from common.engine.devices.cpu.native.experts import NativeExperts

DENSE = LayerSpec(64, 4, 2, 16, 128, 1e-5, Rope(10000.0), AttentionOptions(0.25))
MIXTURE = replace(DENSE, experts=Experts(Routing(8, 2), 32))
PACKED, UNPACKED = (Linear(64, 64, lambda x: x, packed) for packed in (object(), None))
MLP = Mlp(PACKED, PACKED)
EXPERTS = ExpertMlp(PACKED, GroupedMlp(lambda x, expert_ids, weights: x, object.__new__(NativeExperts)))


def layer(spec: LayerSpec, **parts: Any) -> Layer:
    mlp = MLP if spec.experts is None else EXPERTS
    weights: dict[str, Any] = {"norms": {}, "qkv": PACKED, "output": PACKED, "mlp": mlp}
    return Layer(spec, torch.empty(0), **weights | parts)


@pytest.mark.parametrize("spec", [DENSE, MIXTURE, replace(DENSE, qk_norm="head"), replace(DENSE, qkv_bias=True)])
def test_plain_layers_are_known(spec: LayerSpec) -> None:
    assert is_known(layer(spec))


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": AttentionOptions(0.25, window=8)},
        {"attention": AttentionOptions(0.25, soft_cap=5.0)},
        {"has_sinks": True},
        {"norms": POST_NORMS},
        {"qk_norm": "full"},
        {"activation": "gelu_tanh"},
        {"residual_scale": 0.5},
        {"latent": Latent(rank=32, key_size=16, value_size=16)},
        {"experts": Experts(Routing(8, 2, has_choice_bias=True), 32)},
        {"experts": Experts(Routing(8, 2, num_groups=4, num_active_groups=2), 32)},
    ],
)
def test_a_layer_with_what_the_compiled_step_does_not_compute_is_not(fields: dict[str, Any]) -> None:
    assert not is_known(layer(replace(DENSE, **fields)))


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (DENSE, {"qkv": UNPACKED}),
        (DENSE, {"output": UNPACKED}),
        (DENSE, {"mlp": Mlp(PACKED, UNPACKED)}),
        (MIXTURE, {"mlp": replace(EXPERTS, router=UNPACKED)}),
        (MIXTURE, {"mlp": replace(EXPERTS, experts=replace(EXPERTS.experts, packed=None))}),
        (MIXTURE, {"mlp": replace(EXPERTS, shared=Mlp(UNPACKED, PACKED))}),
        (MIXTURE, {"mlp": replace(EXPERTS, shared=MLP, shared_weight=UNPACKED)}),
    ],
)
def test_a_layer_with_a_weight_that_is_not_packed_is_not(spec: LayerSpec, parts: dict[str, Any]) -> None:
    assert not is_known(layer(spec, **parts))


@pytest.mark.parametrize(
    "fields",
    [{"logit_soft_cap": 30.0}, {"logit_scale": 0.5}, {"norm_eps": 1e-6}, {"head": UNPACKED}],
    ids=lambda fields: next(iter(fields)),  # no address: test processes must agree on names
)
def test_logits_that_the_compiled_step_does_not_compute_are_left_to_torch(fields: dict[str, Any]) -> None:
    tail = Tail(torch.empty(0), DENSE.norm_eps, PACKED)
    assert is_known_tail(tail, DENSE)
    assert not is_known_tail(replace(tail, **fields), DENSE)
