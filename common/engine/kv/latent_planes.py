"""The plane of latent attention: one row for all heads, which every rank holds whole.

latent    [rank + head_dim]    numbers of the model's type: what keys and values are products of, then what RoPE turned
"""

import torch

from common.checkpoint import CheckpointError
from common.checkpoint.layers import LayerSpec
from common.engine.contract.attention import LayerKV
from common.engine.contract.kv_spec import Plane
from common.engine.kv.attention_planes import attention_planes
from common.engine.kv.quantized import is_quantized


def planes_of(layer: LayerSpec, dtype: torch.dtype) -> tuple[Plane, ...]:
    """What one token leaves in such a layer. Raises ValueError where that cannot be stored as `dtype`."""
    if layer.latent is None:
        return attention_planes(layer.num_kv_heads, layer.head_dim, dtype)
    if is_quantized(dtype):
        raise CheckpointError("latents are not stored as codes: kv_cache_dtype should be auto for this model")
    return (Plane("latent", (layer.latent.rank + layer.head_dim,), str(dtype).removeprefix("torch.")),)


def write_latents(kv: LayerKV, slots: torch.Tensor, latents: torch.Tensor) -> None:
    """Put latents [num_tokens, size] into `slots` [num_tokens] int64 of one layer."""
    _slots(kv).index_copy_(0, slots, latents)


def read_latents(kv: LayerKV, slots: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `slots` [num_tokens] int64, [num_tokens, 1, size] and [num_tokens, 1, rank]."""
    keys = _slots(kv).index_select(0, slots).unsqueeze(1)
    return keys, keys[..., :rank]


def _slots(kv: LayerKV) -> torch.Tensor:
    """[num_slots, size]"""
    (plane,) = kv
    return plane.view(-1, plane.shape[2])
