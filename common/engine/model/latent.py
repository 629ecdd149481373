"""Latent attention (DeepSeek-V2, 2024, section 2.1), with the products of keys and values absorbed.

The score of a head is q . (U z) = (U^T q) . z for the latent z: queries are taken to the latents once, all heads attend
over the same rows, and the weighted sum of latents is taken to the head's values. Nothing but latents is ever cached,
and prefill and decode are one computation.
"""

from collections.abc import Callable

import torch

from common.checkpoint.layers import Latent, LayerSpec
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.device import Device, LatentWeights, Layer, Linear

NORM_EPS = 1e-6  # of the norms between the products, whatever that of the others is


def write_latents(layer: Layer, device: Device, x: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> torch.Tensor:
    """Write the latents of all tokens [num_tokens, hidden_size]; returns queries [.., num_heads, rank + head_dim]."""
    spec, weights = layer.spec, layer.latent
    assert weights is not None
    assert spec.latent is not None
    latent_size = spec.latent.rank + spec.head_dim
    first, latent = torch.split_with_sizes(layer.qkv(x), (spec.latent.query_rank or spec.q_size, latent_size), dim=1)
    normed = device.elementwise.rms_norm(latent[:, : spec.latent.rank], layer.norms["latent_norm"], NORM_EPS)
    latent = torch.cat((normed, latent[:, spec.latent.rank :]), dim=1)
    if weights.query_up is not None:
        first = weights.query_up(device.elementwise.rms_norm(first, layer.norms["q_down_norm"], NORM_EPS))
    plain, turning = first.view(x.shape[0], spec.num_heads, -1).split_with_sizes(
        (spec.latent.key_size, spec.head_dim), dim=2
    )
    turned = device.attention.rope_and_write_latent(turning, latent, layer.cos_sin, kv, batch)
    return torch.cat((_of_heads(plain, weights.key_up), turned), dim=2)


def values_of(layer: Layer, attended: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, rank] -> [num_tokens, num_heads, value_size]"""
    assert layer.latent is not None
    return _of_heads(attended, layer.latent.value_up)


def _of_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, inputs], [num_heads, inputs, outputs] -> [num_tokens, num_heads, outputs]"""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


def read_latent_weights(
    spec: LayerSpec, latent: Latent, take: Callable[[str], torch.Tensor], linear: Callable[[torch.Tensor], Linear]
) -> tuple[Linear, LatentWeights]:
    """The first product of a layer's input, and the rest. `take` reads a part of `spec.weights`."""
    places = spec.rope.places(spec.head_dim)
    queries = "q_up" if latent.query_rank else "q"
    heads = take(queries).view(spec.num_heads, latent.key_size + spec.head_dim, -1)
    of_queries = _turned(heads, latent.key_size, places).flatten(0, 1)
    of_latents = _turned(take("latent").unsqueeze(0), latent.rank, places)[0]
    up = take("latent_up").view(spec.num_heads, latent.key_size + latent.value_size, latent.rank)
    first = take("q_down") if latent.query_rank else of_queries
    weights = LatentWeights(
        query_up=linear(of_queries) if latent.query_rank else None,
        key_up=up[:, : latent.key_size].contiguous(),
        value_up=up[:, latent.key_size :].transpose(1, 2).contiguous(),
    )
    return linear(torch.cat((first, of_latents))), weights


def _turned(rows: torch.Tensor, first: int, places: list[int]) -> torch.Tensor:
    """[heads, size, inputs] with the rows from `first` on in the order of `Rope.places`."""
    return torch.cat((rows[:, :first], rows[:, first:][:, places]), dim=1)
