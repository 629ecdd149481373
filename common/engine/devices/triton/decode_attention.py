"""Attention of one new token per sequence over paged KV, split along the keys.

FlashDecoding (Dao et al. 2023) over a paged cache: each program attends to one split of the keys for all heads of one
KV head, a second kernel merges the splits. Splits have a fixed length in tokens, so that the sums of a sequence do not
depend on what else is in the batch.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.devices.triton.attention_reference import paged_attention_reference
from common.engine.devices.triton.kv_layout import KVLayout, load_tile
from common.engine.devices.triton.launch import jit, launch
from common.engine.devices.triton.tiles import normalized, online_softmax, paged_slots, scaled_scores, start_with_sinks

decode_attention_reference = paged_attention_reference

SPLIT_LEN = 256  # partial results are group / SPLIT_LEN of the KV traffic: 3 % at 8 heads per KV head


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Keys of a tile, and how a program runs."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_tiles(head_dim: int, dtype: torch.dtype, kind: int = 0) -> DecodeTiles:
    """Sized so that nothing spills on any target of tests/tools/kernel_table.py. `kind` is `KVLayout`'s."""
    if dtype == torch.float32 and kind:
        block_n, num_warps = (64, 4) if head_dim <= 64 else (32, 8) if head_dim <= 128 else (16, 8)
        return DecodeTiles(block_n, num_warps, num_stages=1)
    if dtype == torch.float32:
        return DecodeTiles(block_n=32 if head_dim <= 64 else 16, num_warps=4, num_stages=2)
    # codes are made numbers of in registers, of which gfx942 lacks one for three stages of 128
    num_stages = 2 if kind and 64 < head_dim <= 128 else 3
    return DecodeTiles(block_n=64 if head_dim <= 128 else 32, num_warps=4, num_stages=num_stages)


def decode_candidates(head_dim: int, dtype: torch.dtype, kind: int = 0) -> list[DecodeTiles]:
    """What tuning tries, `decode_tiles` first."""
    default = decode_tiles(head_dim, dtype, kind)
    if dtype == torch.float32:
        return [default]
    small = DecodeTiles(block_n=32, num_warps=2, num_stages=3) if head_dim <= 128 else replace(default, block_n=16)
    # ptxas spills with two stages of 64 (sm_100), and three of so small tiles leave room enough
    if head_dim <= 64 or default.num_stages == 2:
        return [default, small]
    return [default, replace(default, num_stages=2), small]


@jit
def first_key(seq_len: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key that the last token of a sequence sees."""
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0)
    return seq_len * 0


@jit
def decode_attention_kernel(
    partial_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits, HEAD_DIM] float32
    log_sum_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits] float32: log2 of the softmax denominator
    q_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], strides given
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # the same
    key_scale_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] float32; read only if KIND is not PLAIN
    value_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    sinks_ptr: tl.tensor,  # [num_heads] float32; read only if HAS_SINKS
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """grid: (num_splits, NUM_KV_HEADS, num_seqs)."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    token = tl.load(cu_seqlens_q_ptr + seq)
    seq_len = tl.load(seq_lens_ptr + seq)
    start = tl.maximum(split * SPLIT, first_key(seq_len, WINDOW) // BLOCK_N * BLOCK_N)
    end = tl.minimum(split * SPLIT + SPLIT, seq_len)
    if (start >= end) | (tl.load(cu_seqlens_q_ptr + seq + 1) == token):
        return
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    planes = (key_ptr, value_ptr, key_scale_ptr, value_scale_ptr)
    row = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_TILE)
    head = kv_head * GROUP + row
    row_mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = (token.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    query = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)

    acc = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    row_max = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_TILE], tl.float32)
    if HAS_SINKS:  # counted once, in the first split that has keys
        sink, one = start_with_sinks(sinks_ptr, head, row < GROUP)
        is_first = split == first_key(seq_len, WINDOW) // SPLIT
        row_max, row_sum = tl.where(is_first, sink, row_max), tl.where(is_first, one, row_sum)
    for tile_start in range(start, end, BLOCK_N):
        key_pos = tile_start + tl.arange(0, BLOCK_N)
        in_range = (key_pos < end) & (key_pos >= first_key(seq_len, WINDOW))
        slots = paged_slots(block_table_ptr, key_pos, in_range, BLOCK_SIZE)
        key, value, scores_scale, value_scale = load_tile(
            planes, slots, in_range, kv_head, scale,
            NUM_KV_HEADS, HEAD_DIM, DIM_TILE, query.dtype, KIND, MASKED=True,
        )  # fmt: skip
        scores = scaled_scores(query, key, scores_scale, SOFT_CAP)
        scores = tl.where(in_range[None, :], scores, float("-inf"))
        acc, row_max, row_sum = online_softmax(scores, value, value_scale, acc, row_max, row_sum, KIND)

    part = (seq.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * tl.num_programs(0) + split
    tl.store(partial_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], normalized(acc, row_sum), mask=row_mask)
    tl.store(log_sum_ptr + part, row_max + tl.log2(row_sum), mask=row < GROUP)


@jit
def merge_splits_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits, HEAD_DIM] float32
    log_sum_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits] float32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """grid: (num_heads, num_seqs). Merges the splits in their order, SPLIT_TILE at a time."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    token = tl.load(cu_seqlens_q_ptr + seq)
    if tl.load(cu_seqlens_q_ptr + seq + 1) == token:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    dim = tl.arange(0, DIM_TILE)
    part = (seq.to(tl.int64) * tl.num_programs(0) + head) * num_splits

    acc = tl.zeros([DIM_TILE], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(first_key(seq_len, WINDOW) // SPLIT, tl.cdiv(seq_len, SPLIT), SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)
        in_range = split < tl.cdiv(seq_len, SPLIT)
        log_sum = tl.load(log_sum_ptr + part + split, mask=in_range, other=float("-inf"))
        offsets = (part + split)[:, None] * HEAD_DIM + dim[None, :]
        mask = in_range[:, None] & (dim < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        weights = tl.exp2(log_sum - new_top)
        rescale = tl.exp2(top - new_top)
        acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        top = new_top
    out = acc / tl.where(total == 0.0, 1.0, total)
    out_offsets = (token.to(tl.int64) * tl.num_programs(0) + head) * HEAD_DIM + dim
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], last dimension contiguous
    kv: LayerKV,
    batch: AttentionBatch,  # at most one new token per sequence
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    tiles: DecodeTiles | None = None,
) -> torch.Tensor:
    """Attention of each sequence's one new token; zero where seq_len is 0 (the padding of a captured batch).

    For values in [-1, 1] within 1e-5 (float32), 2**-6 (bfloat16; float16 over a quantized cache), 2**-9 (float16) of
    the float64 reference over the same cache.
    """
    assert q.stride(-1) == batch.block_tables.stride(-1) == 1
    assert batch.max_query_len <= 1
    _, num_heads, head_dim = q.shape
    layout = KVLayout.of(kv)
    num_seqs = batch.seq_lens.shape[0]
    num_splits = max(1, triton.cdiv(batch.max_seq_len, SPLIT_LEN))
    group = num_heads // layout.num_kv_heads
    dim_tile = triton.next_power_of_2(head_dim)
    tiles = tiles or decode_tiles(head_dim, q.dtype, layout.kind)
    partial = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    launch(
        decode_attention_kernel, (num_splits, layout.num_kv_heads, num_seqs), q.device,
        partial, log_sum, q, layout.key, layout.value, layout.key_scale, layout.value_scale,
        batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, log_sum if sinks is None else sinks, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0),
        GROUP=group, GROUP_TILE=max(16, triton.next_power_of_2(group)), BLOCK_SIZE=layout.key.shape[1],
        NUM_KV_HEADS=layout.num_kv_heads, HEAD_DIM=head_dim, DIM_TILE=dim_tile,
        BLOCK_N=tiles.block_n, SPLIT=SPLIT_LEN, WINDOW=window, SOFT_CAP=soft_cap, KIND=layout.kind,
        HAS_SINKS=sinks is not None, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        merge_splits_kernel, (num_heads, num_seqs), q.device,
        out, partial, log_sum, batch.cu_seqlens_q, batch.seq_lens, num_splits,
        HEAD_DIM=head_dim, DIM_TILE=dim_tile, SPLIT=SPLIT_LEN, SPLIT_TILE=16, WINDOW=window, num_warps=4,
    )  # fmt: skip
    return out
