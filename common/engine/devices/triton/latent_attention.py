"""Attention over paged latents: one row for all heads, a key as it is and a value by its first numbers.

The kernels of `decode_attention` and `prefill_attention`, with each row loaded once for both uses and for all heads of
a program. A row [RANK + TAIL] is two tiles: one of 576 numbers would be one of 1024.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.devices.triton.attention_reference import attend_reference
from common.engine.devices.triton.decode_attention import SPLIT_LEN, merge_splits_kernel
from common.engine.devices.triton.launch import jit, launch, nvidia_arch
from common.engine.devices.triton.tiles import LOG2_E, dot, normalized, online_softmax, paged_slots

MIN_TILE = 16  # of each side of a product


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Rows, which are (query, head) pairs, and latents of a tile, and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def latent_prefill_tiles(rank: int, dtype: torch.dtype) -> LatentTiles:
    """Sized so that nothing spills on any target of tests/tools/kernel_table.py."""
    if dtype == torch.float32:
        return _wide_tiles()
    # sm_80 and gfx942 hold the products in registers, where sm_90 reads them from shared memory
    return LatentTiles(block_m=64 if nvidia_arch() >= 90 else 32, block_n=16, num_warps=8, num_stages=2)


def latent_decode_tiles(rank: int, dtype: torch.dtype) -> LatentTiles:
    """As above, few rows of many programs."""
    if dtype == torch.float32:
        return _wide_tiles()
    return LatentTiles(block_m=16, block_n=32, num_warps=4, num_stages=2)


def _wide_tiles() -> LatentTiles:
    """Of float32. AMD's matrix units want operands whole in each warp, of which fewer then have more registers each."""
    return LatentTiles(block_m=16, block_n=16, num_warps=8 if nvidia_arch() else 4, num_stages=1)


def latent_attention_reference(
    q: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, rank: int
) -> torch.Tensor:
    """Float64 attention of every new token over its sequence; zero for the tokens of a sequence of length 0."""
    (plane,) = kv
    out = torch.zeros((*q.shape[:2], rank), dtype=torch.float64, device=q.device)
    bounds, size = batch.cu_seqlens_q.tolist(), plane.shape[1]
    for idx, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(bounds[idx], bounds[idx + 1])
        if rows.start == rows.stop or seq_len == 0:
            continue
        positions = torch.arange(seq_len, device=q.device)
        slots = batch.block_tables[idx].long()[positions // size] * size + positions % size
        latents = plane.flatten(0, 1)[slots].unsqueeze(1)
        out[rows] = attend_reference(q[rows], latents, latents[..., :rank], scale)
    return out


@jit
def load_halves(
    rows_ptr: tl.tensor,  # pointers [M] to rows [RANK + TAIL]
    mask: tl.tensor,  # [M]
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The first RANK numbers of each row and the rest, [M, RANK_TILE] and [M, TAIL_TILE], zero beyond and if hidden."""
    dim = tl.arange(0, RANK_TILE)
    tail = tl.arange(0, TAIL_TILE)
    first = tl.load(rows_ptr[:, None] + dim[None, :], mask=mask[:, None] & (dim < RANK)[None, :], other=0.0)
    last = tl.load(rows_ptr[:, None] + RANK + tail[None, :], mask=mask[:, None] & (tail < TAIL)[None, :], other=0.0)
    return first, last


@jit
def attend_latents(
    query: tl.tuple,  # [M, RANK_TILE] and [M, TAIL_TILE]
    query_pos: tl.tensor,  # [M]
    state: tl.tuple,  # acc [M, RANK_TILE] float32, row_max [M], row_sum [M]
    start: tl.tensor,
    end: tl.tensor,
    plane_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tuple:
    """Stream latents [start, end) through the running softmax; a row sees those up to its position."""
    acc, row_max, row_sum = state
    query_first, query_last = query
    for first_key in range(start, end, BLOCK_N):
        key_pos = first_key + tl.arange(0, BLOCK_N)
        in_range = key_pos < end
        slots = paged_slots(block_table_ptr, key_pos, in_range, BLOCK_SIZE)
        latent, last = load_halves(plane_ptr + slots * (RANK + TAIL), in_range, RANK, RANK_TILE, TAIL, TAIL_TILE)
        scores = dot(query_first, tl.trans(latent)) + dot(query_last, tl.trans(last))
        visible = (key_pos[None, :] <= query_pos[:, None]) & in_range[None, :]
        scores = tl.where(visible, scores * scale * LOG2_E, float("-inf"))
        acc, row_max, row_sum = online_softmax(scores, latent, row_max, acc, row_max, row_sum, False)
    return acc, row_max, row_sum


@jit
def latent_decode_kernel(
    partial_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits, RANK] float32
    log_sum_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits] float32: log2 of the softmax denominator
    q_ptr: tl.tensor,  # [num_tokens, num_heads, RANK + TAIL], contiguous
    plane_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, RANK + TAIL]
    block_tables_ptr: tl.tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    scale: tl.tensor,
    block_table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """grid: (num_splits, cdiv(NUM_HEADS, BLOCK_M), num_seqs)."""
    split = tl.program_id(0)
    seq = tl.program_id(2)
    token = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    start = split * SPLIT
    end = tl.minimum(start + SPLIT, seq_len)
    if (start >= end) | (tl.load(cu_seqlens_q_ptr + seq + 1) == token):
        return
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = head < NUM_HEADS
    rows_ptr = q_ptr + (token * NUM_HEADS + head) * (RANK + TAIL)
    query = load_halves(rows_ptr, exists, RANK, RANK_TILE, TAIL, TAIL_TILE)
    acc = tl.zeros([BLOCK_M, RANK_TILE], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    query_pos = seq_len - 1 + head * 0
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    acc, row_max, row_sum = attend_latents(
        query, query_pos, (acc, row_max, row_sum), start, end, plane_ptr, block_table_ptr, scale,
        BLOCK_SIZE, RANK, RANK_TILE, TAIL, TAIL_TILE, BLOCK_N,
    )  # fmt: skip
    part = (seq.to(tl.int64) * NUM_HEADS + head) * tl.num_programs(0) + split
    dim = tl.arange(0, RANK_TILE)
    mask = exists[:, None] & (dim < RANK)[None, :]
    tl.store(partial_ptr + (part * RANK)[:, None] + dim[None, :], normalized(acc, row_sum), mask=mask)
    tl.store(log_sum_ptr + part, row_max + tl.log2(row_sum), mask=exists)


@jit
def find_rows(cu_seqlens_q_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The sequence that owns a tile of ROWS[1] rows: sequence i has tiles from cu_seqlens_q[i] * ROWS[0] // ROWS[1] + i
    on."""
    low = tl.zeros_like(tile)
    high = low + num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) * ROWS[0] // ROWS[1] + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def latent_prefill_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, RANK], contiguous
    q_ptr: tl.tensor,  # [num_tokens, num_heads, RANK + TAIL], contiguous
    plane_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, RANK + TAIL]
    block_tables_ptr: tl.tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    num_seqs: tl.tensor,
    num_tiles: tl.tensor,  # upper bound over all sequences
    scale: tl.tensor,
    block_table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """grid: (num_tiles,). Rows of a sequence are its queries' heads, one query after another."""
    # The last tile of a sequence sees the most keys: start with it, so that no long program starts last.
    tile = num_tiles - 1 - tl.program_id(0)
    seq = find_rows(cu_seqlens_q_ptr, tile, num_seqs, (NUM_HEADS, BLOCK_M))
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    first_row = (tile - first_token * NUM_HEADS // BLOCK_M - seq) * BLOCK_M
    if first_row >= query_len * NUM_HEADS:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    exists = row < query_len * NUM_HEADS
    at = first_token.to(tl.int64) * NUM_HEADS + row
    query = load_halves(q_ptr + at * (RANK + TAIL), exists, RANK, RANK_TILE, TAIL, TAIL_TILE)
    seq_len = tl.load(seq_lens_ptr + seq)
    cached = seq_len - query_len
    end = tl.minimum(cached + (first_row + BLOCK_M - 1) // NUM_HEADS + 1, seq_len)
    acc = tl.zeros([BLOCK_M, RANK_TILE], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = attend_latents(
        query, cached + row // NUM_HEADS, (acc, row_max, row_sum), 0, end, plane_ptr,
        block_tables_ptr + seq.to(tl.int64) * block_table_stride, scale,
        BLOCK_SIZE, RANK, RANK_TILE, TAIL, TAIL_TILE, BLOCK_N,
    )  # fmt: skip
    dim = tl.arange(0, RANK_TILE)
    mask = exists[:, None] & (dim < RANK)[None, :]
    out = normalized(acc, row_sum).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (at * RANK)[:, None] + dim[None, :], out, mask=mask)


def latent_decode_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, rank + tail], contiguous
    kv: LayerKV,
    batch: AttentionBatch,  # at most one new token per sequence
    scale: float,
    rank: int,
) -> torch.Tensor:
    """[num_tokens, num_heads, rank]: of each sequence's one new token; zero where seq_len is 0. Bounds are those of
    `decode_attention`."""
    assert q.is_contiguous()
    assert batch.max_query_len <= 1
    num_heads, num_seqs = q.shape[1], batch.seq_lens.shape[0]
    tiles, sizes = latent_decode_tiles(rank, q.dtype), _sizes(q, kv, rank)
    num_splits = max(1, triton.cdiv(batch.max_seq_len, SPLIT_LEN))
    partial = torch.empty((num_seqs, num_heads, num_splits, rank), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    launch(
        latent_decode_kernel, (num_splits, triton.cdiv(num_heads, tiles.block_m), num_seqs), q.device,
        partial, log_sum, q, kv[0], batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, scale,
        batch.block_tables.stride(0), **sizes,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, SPLIT=SPLIT_LEN,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    launch(
        merge_splits_kernel, (num_heads, num_seqs), q.device,
        out, partial, log_sum, batch.cu_seqlens_q, batch.seq_lens, num_splits,
        HEAD_DIM=rank, DIM_TILE=triton.next_power_of_2(rank), SPLIT=SPLIT_LEN, SPLIT_TILE=16, WINDOW=0, num_warps=4,
    )  # fmt: skip
    return out


def latent_prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, rank + tail], contiguous
    kv: LayerKV,
    batch: AttentionBatch,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """[num_tokens, num_heads, rank]: of every new token, any number of them for each sequence. Bounds are those of
    `prefill_attention`."""
    assert q.is_contiguous()
    num_tokens, num_heads, _ = q.shape
    tiles, sizes = latent_prefill_tiles(rank, q.dtype), _sizes(q, kv, rank)
    num_seqs = batch.seq_lens.shape[0]
    num_tiles = num_tokens * num_heads // tiles.block_m + num_seqs if num_tokens else 0
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    launch(
        latent_prefill_kernel, (num_tiles,), q.device,
        out, q, kv[0], batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, num_seqs, num_tiles, scale,
        batch.block_tables.stride(0), **sizes, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _sizes(q: torch.Tensor, kv: LayerKV, rank: int) -> dict[str, int]:
    (plane,) = kv
    assert plane.is_contiguous()
    assert plane.shape[2] == q.shape[2]
    tail = q.shape[2] - rank
    return {
        **{"NUM_HEADS": q.shape[1], "BLOCK_SIZE": plane.shape[1], "RANK": rank, "TAIL": tail},
        "RANK_TILE": max(MIN_TILE, triton.next_power_of_2(rank)),
        "TAIL_TILE": max(MIN_TILE, triton.next_power_of_2(tail)),
    }
