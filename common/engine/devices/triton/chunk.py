"""Pack a chunk of the KV cache for the wire, and unpack it: a copy of rows, blind to what the elements mean.

A payload is [num_layers of the chunk, 2 (K, V), num_tokens, num_kv_heads, head_dim], contiguous.
"""

import torch
import triton
import triton.language as tl

from common.engine.devices.triton.launch import jit, launch

TOKEN_TILE = 16
WORD_TILE = 256  # 4-byte words of a row per program


def pack_chunk_reference(cache: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    """Gather the rows of `slots` in `layers` into `payload`; zeros for a slot below 0."""
    rows = cache[layers.start : layers.stop].flatten(2, 3)
    payload.copy_(rows[:, :, slots.clamp(min=0)])
    payload[:, :, slots < 0] = 0


def unpack_chunk_reference(cache: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    """Scatter `payload` to the rows of `slots` in `layers`; a slot below 0 is skipped."""
    kept = slots >= 0
    cache.flatten(2, 3)[layers.start : layers.stop, :, slots[kept]] = payload[:, :, kept]


@jit
def copy_chunk_kernel(
    planes_ptr: tl.tensor,  # [num planes, num_slots, ROW_WORDS] int32: planes of the chunk's first layer on
    payload_ptr: tl.tensor,  # [num planes of the chunk, num_tokens, ROW_WORDS] int32
    slots_ptr: tl.tensor,  # [num_tokens] int64
    num_tokens: tl.tensor,
    num_slots: tl.tensor,
    ROW_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_PACK: tl.constexpr,
) -> None:
    """grid: (cdiv(num_tokens, TOKENS), planes of the chunk, cdiv(ROW_WORDS, WORDS))."""
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    exists = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    in_cache = planes_ptr + ((plane * num_slots + slot) * ROW_WORDS)[:, None] + word[None, :]
    in_payload = payload_ptr + ((plane * num_tokens + token) * ROW_WORDS)[:, None] + word[None, :]
    in_row = (word < ROW_WORDS)[None, :]
    has_slot = (slot >= 0)[:, None] & in_row
    if IS_PACK:
        tl.store(in_payload, tl.load(in_cache, mask=has_slot, other=0), mask=exists[:, None] & in_row)
    else:
        tl.store(in_cache, tl.load(in_payload, mask=has_slot, other=0), mask=has_slot)


def pack_chunk(cache: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    """Gather the rows of `slots` in `layers` of `cache` into `payload`; zeros for a slot below 0.

    cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; slots: [num_tokens] int64;
    payload: [len(layers), 2, num_tokens, num_kv_heads, head_dim], contiguous, on the cache's device. The last two
    dimensions of a quantized cache are [1, row_bytes]: rows travel with their scales. Bits equal the reference's.
    """
    _copy_chunk(cache, slots, layers, payload, is_pack=True)


def unpack_chunk(cache: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    """Scatter `payload` to the rows of `slots` in `layers` of `cache`; a slot below 0 is skipped. Shapes as above."""
    _copy_chunk(cache, slots, layers, payload, is_pack=False)


def _copy_chunk(
    cache: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor, *, is_pack: bool
) -> None:
    num_layers, _, num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    assert 0 <= layers.start <= layers.stop <= num_layers
    assert layers.step == 1
    assert payload.shape == (len(layers), 2, slots.shape[0], num_kv_heads, head_dim)
    assert payload.dtype == cache.dtype
    assert cache.is_contiguous()
    assert payload.is_contiguous()
    row_words, rest = divmod(num_kv_heads * head_dim * cache.element_size(), 4)
    assert rest == 0
    words = min(WORD_TILE, triton.next_power_of_2(row_words))
    grid = (triton.cdiv(slots.shape[0], TOKEN_TILE), 2 * len(layers), triton.cdiv(row_words, words))
    launch(
        copy_chunk_kernel, grid, cache.device,
        _as_words(cache[layers.start : layers.stop]), _as_words(payload), slots, slots.shape[0],
        num_blocks * block_size, ROW_WORDS=row_words, TOKENS=TOKEN_TILE, WORDS=words, IS_PACK=is_pack,
        num_warps=max(1, min(4, TOKEN_TILE * words // 256)),  # 4 words per thread and load, at 64 threads a warp
    )  # fmt: skip


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
