"""KV caches for tests, as a whole: made, filled and looked at plane by plane."""

import torch

from common.checkpoint import ModelSpec
from common.checkpoint.families import layers_of
from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.engine.kv.attention_planes import attention_planes
from common.engine.kv.cache import KVCache
from common.engine.kv.latent_planes import planes_of as planes_of_layer


def attention_spec(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
) -> KVSpec:
    """Keys and values of layers that are all in one group."""
    group = KVGroup(tuple(range(num_layers)), attention_planes(num_kv_heads, head_dim, dtype))
    return KVSpec(block_size, (group,))


def kv_spec_in_one_group(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> KVSpec:
    """What a model's tokens leave behind, all layers in one group, those with a window too."""
    (layer, *_) = layers_of(spec)
    return KVSpec(block_size, (KVGroup(tuple(range(spec.num_layers)), planes_of_layer(layer, dtype)),))


def row_spec(num_layers: int, bytes_per_token_layer: int, block_size: int = 16) -> KVSpec:
    """One plane of nothing but bytes."""
    return KVSpec(block_size, (KVGroup(tuple(range(num_layers)), (Plane("row", (bytes_per_token_layer,), "int8"),)),))


def planes_of(cache: KVCache) -> list[torch.Tensor]:
    """[num_layers, num_blocks, block_size, *row] each."""
    return [plane for planes in cache.planes for plane in planes]


def fill(cache: KVCache, value: float) -> None:
    for plane in planes_of(cache):
        plane.fill_(value)


def fill_block(cache: KVCache, block: int, value: float) -> None:
    for plane in planes_of(cache):
        plane[:, block] = value


def fill_bytes(cache: KVCache, value: int) -> None:
    for plane in planes_of(cache):
        plane.view(torch.uint8).fill_(value)


def snapshot(cache: KVCache) -> torch.Tensor:
    """A copy of a cache of keys and values: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
    return torch.stack(planes_of(cache), 1)


def blocks_hold(cache: KVCache, blocks: list[int], value: float) -> bool:
    return all(bool((plane[:, blocks] == value).all()) for plane in planes_of(cache))
