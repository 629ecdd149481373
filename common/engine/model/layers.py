"""Computes a layer one operator after another, as its `LayerSpec` says, and reads its weights by the family's names."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from common.checkpoint.layers import Experts, LayerSpec
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.collectives import Collectives
from common.engine.contract.device import (
    Device,
    ExpertMlp,
    ExpertWeights,
    GroupedMlp,
    LatentWeights,
    Layer,
    Linear,
    Mlp,
)
from common.engine.contract.elementwise import activate
from common.engine.model.experts import expert_mlp
from common.engine.model.latent import read_latent_weights, values_of, write_latents
from common.engine.model.parallel import summed, summed_experts
from common.engine.model.weights import Weights


def write_kv(layer: Layer, device: Device, hidden: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> torch.Tensor:
    """Write K and V, or the latents, of all tokens [num_tokens, hidden_size]; returns the rotated queries
    [num_tokens, num_heads, head_dim], of the latents' size over those."""
    spec = layer.spec
    normed = _norm(layer, device, hidden, "before_attention")
    if layer.latent is not None:
        return write_latents(layer, device, normed, kv, batch)
    parts = layer.qkv(normed)
    q, k, v = torch.split_with_sizes(parts, (spec.q_size, spec.kv_size, spec.kv_size), dim=1)
    if spec.qk_norm == "full":
        q, k = _norm(layer, device, q, "q_norm"), _norm(layer, device, k, "k_norm")
    q, k, v = (x.view(x.shape[0], -1, spec.head_dim) for x in (q, k, v))
    if spec.qk_norm == "head":
        q, k = _norm(layer, device, q, "q_norm"), _norm(layer, device, k, "k_norm")
    return device.attention.rope_and_write(q, k, v, layer.cos_sin, kv, batch)


def attend(layer: Layer, device: Device, q: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim]"""
    attended = device.attention.attend(q, kv, batch, layer.spec.attention, layer.sinks)
    return (attended if layer.latent is None else values_of(layer, attended)).flatten(1)


def finish(layer: Layer, device: Device, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Output projection, MLP and residuals, row by row; returns the layer's output [num_rows, hidden_size]."""
    spec, ops = layer.spec, device.elementwise
    added = _scaled(spec, _norm(layer, device, layer.output(attended), "after_attention"))
    if "before_mlp" in spec.norms:
        normed, hidden = ops.add_rms_norm(added, hidden, layer.norms["before_mlp"], spec.norm_eps)
    else:
        normed = hidden = added + hidden
    return hidden.add_(_scaled(spec, _norm(layer, device, _mlp(layer, device, normed), "after_mlp")))


def _scaled(spec: LayerSpec, x: torch.Tensor) -> torch.Tensor:
    return x if spec.residual_scale == 1 else x * spec.residual_scale


def _mlp(layer: Layer, device: Device, x: torch.Tensor) -> torch.Tensor:
    spec, mlp = layer.spec, layer.mlp
    if isinstance(mlp, ExpertMlp):
        assert spec.experts is not None
        return expert_mlp(mlp, spec.experts.routing, device, x)
    return mlp.down(activate(device.elementwise, spec.activation, mlp.gate_up(x)))


def _norm(layer: Layer, device: Device, x: torch.Tensor, name: str) -> torch.Tensor:
    """Normalized over the last axis, where the layer has such a norm."""
    weight = layer.norms.get(name)
    return x if weight is None else device.elementwise.rms_norm(x, weight, layer.spec.norm_eps)


def read_layer(
    spec: LayerSpec,
    cos_sin: torch.Tensor,
    weights: Weights,
    prefix: str,
    names: Mapping[str, str],
    device: Device,
    collectives: Collectives | None = None,
) -> Layer:
    """The weights under `prefix`, laid out for the device. `names`: `Family.names`. Raises CheckpointError.

    With `collectives`, `spec` and the weights are those of one rank.
    """

    def take(part: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = weights.take(f"{prefix}.{names[part]}.{kind}", shape)
        is_turned = part in ("q", "k") or (part in ("q_norm", "k_norm") and spec.qk_norm == "head")
        return placed(tensor, spec) if is_turned and (spec.rope.size or spec.rope.is_interleaved) else tensor

    def whole(part: str) -> torch.Tensor:
        return weights.take(f"{prefix}.{names[part]}.weight", spec.weights[part])

    def exactly(part: str) -> torch.Tensor:
        return weights.take(f"{prefix}.{names[part]}.weight", spec.weights[part], torch.float32)

    def product(*parts: str, min_bits: int = 4) -> Linear:
        """Several projections of the same input as one; its output holds them in the order given."""
        biases = [take(part, "bias", spec.weights[part][:1]) for part in parts if part in spec.biases]
        return device.linear(
            torch.cat([take(part, "weight", spec.weights[part]) for part in parts]),
            torch.cat(biases) if biases else None,
            min_bits=min_bits,
        )

    def grouped(experts: Experts) -> GroupedMlp:
        found = device.grouped_mlp(experts, spec.activation, _read_experts(spec, experts, weights, prefix, names))
        return summed_experts(found, collectives)

    def gated(prefix: str) -> Mlp:
        gate_up = product(f"{prefix}gate", f"{prefix}up")
        return Mlp(gate_up, summed(product(f"{prefix}down"), collectives))

    def mlp() -> Mlp | ExpertMlp:
        experts = spec.experts
        if experts is None:
            return gated("")
        return ExpertMlp(
            router=product("router", min_bits=16),
            experts=grouped(experts),
            choice_bias=exactly("choice_bias") if experts.routing.has_choice_bias else None,
            shared=gated("shared_") if experts.is_shared else None,
            shared_weight=product("shared_weight", min_bits=16) if experts.has_shared_gate else None,
        )

    qkv, latent = _read_attention(spec, product, whole, device)
    return Layer(
        spec=spec,
        cos_sin=cos_sin,
        norms={name: take(name, "weight", shape) for name, shape in spec.norm_weights.items()},
        qkv=qkv,
        output=summed(product("output"), collectives),
        mlp=mlp(),
        sinks=exactly("sinks") if spec.has_sinks else None,
        latent=latent,
    )


def _read_attention(
    spec: LayerSpec, product: Callable[..., Linear], whole: Callable[[str], torch.Tensor], device: Device
) -> tuple[Linear, LatentWeights | None]:
    """The product of a layer's input, and what latents need besides."""
    if spec.latent is None:
        return product("q", "k", "v"), None
    return read_latent_weights(spec, spec.latent, whole, device.linear)


def placed(rows: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The rows of each head of q or k in the order of `Rope.places`."""
    places = spec.rope.places(spec.head_dim)
    return rows.view(-1, spec.head_dim, *rows.shape[1:])[:, places].reshape(rows.shape)


def _read_experts(
    spec: LayerSpec, experts: Experts, weights: Weights, prefix: str, names: Mapping[str, str]
) -> Iterator[ExpertWeights]:
    """One after another, so that no more than one is held twice."""
    for expert in range(experts.routing.num_experts):
        read = partial(_read_expert, spec, weights, prefix, names, expert)
        yield ExpertWeights(*read("weight"), *(read("bias") if experts.has_biases else ()))


def _read_expert(
    spec: LayerSpec, weights: Weights, prefix: str, names: Mapping[str, str], expert: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in one, gate first, and down."""
    *gate_up, down = (
        weights.take(f"{prefix}.{names[part].format(expert)}.{kind}", shape if kind == "weight" else shape[:1])
        for part, shape in spec.expert_weights.items()
    )
    gate, up = gate_up if len(gate_up) == 2 else (gate_up[0][0::2], gate_up[0][1::2])
    return torch.cat((gate, up)), down
