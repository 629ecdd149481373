"""Causal attention of many new tokens over paged KV, in one launch for all sequences.

FlashAttention-2 (Dao 2023) over a paged cache (Kwon et al. 2023): a program owns a tile of rows, streams the keys
and values it may see, and keeps a running softmax. The rows of a tile are (query, head) pairs of one KV head, so
the heads that share a KV head share its loads.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.devices.triton.attention_reference import paged_attention_reference
from common.engine.devices.triton.kv_layout import KVLayout, load_tile
from common.engine.devices.triton.launch import all_registers, jit, launch, num_processors, nvidia_arch
from common.engine.devices.triton.tiles import (
    is_visible,
    normalized,
    online_softmax,
    paged_slots,
    scaled_scores,
    start_with_sinks,
)

prefill_attention_reference = paged_attention_reference


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows and keys of a tile, and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    is_persistent: bool = False  # as many programs as processors, each takes tile after tile


def prefill_tiles(num_rows: int, head_dim: int, dtype: torch.dtype, kind: int = 0) -> PrefillTiles:
    """Sized so that nothing spills on any target of tests/tools/kernel_table.py. `kind` is `KVLayout`'s."""
    if dtype == torch.float32:
        block_m, block_n = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
        return PrefillTiles(block_m, block_n, num_warps=8, num_stages=1)
    if head_dim > 128:
        block_n = 16 if kind and not nvidia_arch() else 32
        return PrefillTiles(block_m=64, block_n=block_n, num_warps=8, num_stages=2)
    if kind:  # codes are made numbers of in registers
        return PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=2)
    # sm_80 and gfx942 hold the products in registers, where sm_90 reads them from shared memory
    block_n = 64 if head_dim <= 64 or nvidia_arch() >= 90 else 32
    if num_rows <= 64:
        return PrefillTiles(block_m=64, block_n=block_n if head_dim <= 64 else 32, num_warps=4, num_stages=2)
    return PrefillTiles(block_m=128, block_n=block_n, num_warps=8, num_stages=3)


def prefill_candidates(head_dim: int, dtype: torch.dtype, kind: int = 0) -> list[PrefillTiles]:
    """What tuning tries for many rows, `prefill_tiles` first.

    Persistent programs save launches of short tiles and find their tile in a loop; what they save on a card was never
    measured here, so they are a candidate and not the rule. They give the same bits.
    """
    default = prefill_tiles(1 << 20, head_dim, dtype, kind)
    if dtype == torch.float32:
        return [default]
    return [default, replace(default, is_persistent=True), replace(default, num_stages=max(1, default.num_stages - 1))]


@jit
def find_sequence(
    cu_seqlens_q_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The sequence that owns a tile: sequence i has tiles from cu_seqlens_q[i] // BLOCK_Q + i on."""
    low = tl.zeros_like(tile)
    high = low + num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def attend_keys(
    query: tl.tensor,  # [BLOCK_M, DIM_TILE]
    query_pos: tl.tensor,  # [BLOCK_M]
    first_pos: tl.tensor,  # the first of them
    state: tl.tuple,  # acc [BLOCK_M, DIM_TILE] float32, row_max [BLOCK_M], row_sum [BLOCK_M]
    start: tl.tensor,
    end: tl.tensor,
    planes: tl.tuple,  # pointers: keys, values, their scales
    block_table_ptr: tl.tensor,  # [max_blocks] int32
    kv_head: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Stream keys [start, end) through the running softmax. Not MASKED: every row sees every key.

    What no row sees is not read: in blocks behind a window there may be anything.
    """
    acc, row_max, row_sum = state
    for first_key in range(start, end, BLOCK_N):
        key_pos = first_key + tl.arange(0, BLOCK_N)
        in_range = key_pos < end
        if WINDOW > 0:
            in_range = in_range & (key_pos > first_pos - WINDOW)
        slots = paged_slots(block_table_ptr, key_pos, in_range, BLOCK_SIZE)
        key, value, scores_scale, value_scale = load_tile(
            planes, slots, in_range, kv_head, scale,
            NUM_KV_HEADS, HEAD_DIM, DIM_TILE, query.dtype, KIND, MASKED,
        )  # fmt: skip
        scores = scaled_scores(query, key, scores_scale, SOFT_CAP)
        if MASKED:
            visible = is_visible(query_pos, key_pos, WINDOW) & in_range[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        acc, row_max, row_sum = online_softmax(scores, value, value_scale, acc, row_max, row_sum, KIND)
    return acc, row_max, row_sum


@jit
def find_tile(
    cu_seqlens_q_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, BLOCK_Q: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first token, its number of new tokens, the tile's first new token); empty if that is beyond."""
    seq = find_sequence(cu_seqlens_q_ptr, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    return seq, first_token, query_len, (tile - first_token // BLOCK_Q - seq) * BLOCK_Q


@jit
def attend_tile(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    planes: tl.tuple,
    block_table_ptr: tl.tensor,
    seq_len: tl.tensor,
    place: tl.tuple,  # first token and number of new tokens of the sequence, first new token of the tile
    kv_head: tl.tensor,
    sinks_ptr: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """One tile of rows over all keys that it may see."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    first_token, query_len, first_query = place
    row = tl.arange(0, BLOCK_M)
    query_idx = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = (first_token + query_idx).to(tl.int64)
    dim = tl.arange(0, DIM_TILE)
    row_mask = ((row < BLOCK_Q * GROUP) & (query_idx < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    query = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)

    first_pos = seq_len - query_len + first_query
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    acc = tl.zeros([BLOCK_M, DIM_TILE], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        row_max, row_sum = start_with_sinks(sinks_ptr, head, row < BLOCK_Q * GROUP)
    state = (acc, row_max, row_sum)
    query_pos = first_pos + row // GROUP
    if WINDOW > 0:
        masked_from = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (first_pos + 1) // BLOCK_N * BLOCK_N
        state = attend_keys(
            query, query_pos, first_pos, state, 0, masked_from, planes, block_table_ptr, kv_head, scale, BLOCK_SIZE,
            NUM_KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_N, WINDOW, SOFT_CAP, KIND, MASKED=False,
        )  # fmt: skip
    state = attend_keys(
        query, query_pos, first_pos, state, masked_from, end, planes, block_table_ptr, kv_head, scale, BLOCK_SIZE,
        NUM_KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_N, WINDOW, SOFT_CAP, KIND, MASKED=True,
    )  # fmt: skip
    acc, row_max, row_sum = state
    out_offsets = ((token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out_ptr + out_offsets, normalized(acc, row_sum).to(out_ptr.dtype.element_ty), mask=row_mask)


@jit
def prefill_attention_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    q_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], strides given
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # the same
    key_scale_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] float32; read only if KIND is not PLAIN
    value_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    num_seqs: tl.tensor,
    num_tiles: tl.tensor,  # upper bound of query tiles over all sequences
    sinks_ptr: tl.tensor,  # [num_heads] float32; read only if HAS_SINKS
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PERSISTENT: tl.constexpr,
) -> None:
    """grid: (num_tiles * NUM_KV_HEADS,), or as many programs as run at once if IS_PERSISTENT."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    planes = (key_ptr, value_ptr, key_scale_ptr, value_scale_ptr)
    # The last tile of a sequence sees the most keys: start with it, so that no long program starts last.
    if IS_PERSISTENT:
        for work in range(tl.program_id(0), num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
            tile = num_tiles - 1 - work // NUM_KV_HEADS
            seq, first_token, query_len, first_query = find_tile(cu_seqlens_q_ptr, tile, num_seqs, BLOCK_Q)
            if first_query < query_len:
                attend_tile(
                    out_ptr, q_ptr, planes, block_tables_ptr + seq.to(tl.int64) * block_table_stride,
                    tl.load(seq_lens_ptr + seq), (first_token, query_len, first_query), work % NUM_KV_HEADS,
                    sinks_ptr, scale, q_token_stride, q_head_stride, GROUP, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM,
                    DIM_TILE, BLOCK_M, BLOCK_N, WINDOW, SOFT_CAP, KIND, HAS_SINKS,
                )  # fmt: skip
    else:
        tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
        seq, first_token, query_len, first_query = find_tile(cu_seqlens_q_ptr, tile, num_seqs, BLOCK_Q)
        if first_query >= query_len:
            return
        attend_tile(
            out_ptr, q_ptr, planes, block_tables_ptr + seq.to(tl.int64) * block_table_stride,
            tl.load(seq_lens_ptr + seq), (first_token, query_len, first_query), tl.program_id(0) % NUM_KV_HEADS,
            sinks_ptr, scale, q_token_stride, q_head_stride, GROUP, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DIM_TILE,
            BLOCK_M, BLOCK_N, WINDOW, SOFT_CAP, KIND, HAS_SINKS,
        )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], last dimension contiguous
    kv: LayerKV,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    tiles: PrefillTiles | None = None,
) -> torch.Tensor:
    """Attention of every new token over its sequence; a sequence may have any number of them, also one or none.

    For values in [-1, 1] within 1e-5 (float32), 2**-6 (bfloat16; float16 over a quantized cache), 2**-9 (float16) of
    the float64 reference over the same cache.
    """
    assert q.stride(-1) == batch.block_tables.stride(-1) == 1
    num_tokens, num_heads, head_dim = q.shape
    layout = KVLayout.of(kv)
    group = num_heads // layout.num_kv_heads
    tiles = tiles or prefill_tiles(batch.max_query_len * group, head_dim, q.dtype, layout.kind)
    num_seqs = batch.seq_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tiles = num_tokens // (tiles.block_m // group) + num_seqs if num_tokens else 0
    num_programs = num_tiles * layout.num_kv_heads
    if tiles.is_persistent:
        num_programs = min(num_programs, num_processors(q.device))
    # ptxas spills 16 bytes of a short tile for sm_100 (triton 3.7.1), and none for sm_80 and sm_90
    is_short = head_dim <= 64 and tiles.num_warps == 4 and nvidia_arch() >= 100
    needs_registers = head_dim <= 128 if layout.kind else is_short
    registers = all_registers() if needs_registers else {}
    launch(
        prefill_attention_kernel, (num_programs,), q.device,
        out, q, layout.key, layout.value, layout.key_scale, layout.value_scale,
        batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, num_seqs, num_tiles,
        batch.seq_lens if sinks is None else sinks, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0),
        GROUP=group, BLOCK_SIZE=layout.key.shape[1], NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=head_dim, DIM_TILE=triton.next_power_of_2(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        WINDOW=window, SOFT_CAP=soft_cap, KIND=layout.kind, HAS_SINKS=sinks is not None,
        IS_PERSISTENT=tiles.is_persistent, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **registers,
    )  # fmt: skip
    return out
