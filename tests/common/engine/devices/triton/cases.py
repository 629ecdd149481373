"""Inputs for the kernels, used on the CPU and on a GPU: a paged cache whose unused slots are poisoned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.kv_spec import first_token_needed
from common.engine.kv.attention_planes import attention_planes, write_rows
from common.engine.kv.quantized import LIMITS, is_quantized

# Error bounds for values in [-1, 1]. An attention output is a mean of values: its weights are rounded to the type
# (relative 2**-p, p significand bits; the interpreter truncates, which doubles it) and so is the output itself.
ATTENTION_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2 * 2**-7 + 1e-5, torch.float16: 2 * 2**-10 + 1e-5}
# A float16 model's weights are bfloat16 where they carry the scales of a quantized cache.
QUANTIZED_ATTENTION_BOUND = ATTENTION_BOUND | {torch.float16: ATTENTION_BOUND[torch.bfloat16]}
# One operation in float32, rounded (or truncated) once: relative to the largest magnitude that took part.
ROUNDING_BOUND = {torch.float32: 2**-21, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything but the lengths."""

    head_dim: int = 64
    num_kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    is_sliced: bool = False  # q is a slice of a wider tensor, as out of a fused projection
    poison: float = float("nan")
    kv_dtype: torch.dtype | None = None  # of a quantized cache; None = `dtype`
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class AttentionCase:
    q: torch.Tensor
    kv: LayerKV
    batch: AttentionBatch
    scale: float


def attention_case(lengths: Sequence[tuple[int, int]], shape: Shape, seed: int = 0) -> AttentionCase:
    """`lengths`: (seq_len, query_len) per sequence. Blocks lie in random order; what is unused holds poison."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // shape.block_size) for seq_len, _ in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    block_tables = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
    kv = poisoned_cache(len(order), shape)
    slots, positions = [], []
    for idx, (seq_len, query_len) in enumerate(lengths):
        block_tables[idx, : counts[idx]] = order[sum(counts[:idx]) :][: counts[idx]]
        position = torch.arange(seq_len)
        slot = block_tables[idx].long()[position // shape.block_size] * shape.block_size
        slot = slot + position % shape.block_size
        rows = _uniform((2, seq_len, shape.num_kv_heads, shape.head_dim), generator, shape.dtype)
        write_rows(kv, slot, *rows)
        slots.append(slot[seq_len - query_len :])
        positions.append(position[seq_len - query_len :])
    query_lens = [query_len for _, query_len in lengths]
    batch = AttentionBatch(
        positions=torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(shape.device),
        slot_mapping=torch.cat([torch.zeros(0, dtype=torch.int64), *slots]).to(shape.device),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(shape.device),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lengths], dtype=torch.int32, device=shape.device),
        block_tables=block_tables.to(shape.device),
        max_query_len=max([*query_lens, 0]),
        max_seq_len=max([seq_len for seq_len, _ in lengths] + [0]),
    )
    q = _queries(sum(query_lens), shape, generator)
    return AttentionCase(q, tuple(plane.to(shape.device) for plane in kv), batch, scale=2.0 * shape.head_dim**-0.5)


def without_released(case: AttentionCase, window: int) -> AttentionCase:
    """The case when others have the blocks behind the window: their slots hold no numbers."""
    kv = tuple(plane.clone() for plane in case.kv)
    size, bounds = kv[0].shape[1], case.batch.cu_seqlens_q.tolist()
    for idx, seq_len in enumerate(case.batch.seq_lens.tolist()):
        position = torch.arange(first_token_needed(seq_len - (bounds[idx + 1] - bounds[idx]), window))
        slots = case.batch.block_tables[idx].long().cpu()[position // size] * size + position % size
        for plane in kv:
            plane.view(torch.uint8).flatten(0, 1)[slots.to(plane.device)] = 0xFF
    return replace(case, kv=kv)


def poisoned_cache(num_blocks: int, shape: Shape) -> LayerKV:
    """One layer in which no slot is written; quantized: every scale is NaN."""
    size = (num_blocks, shape.block_size)
    planes = attention_planes(shape.num_kv_heads, shape.head_dim, shape.kv_dtype or shape.dtype)
    if shape.kv_dtype is None:
        return tuple(torch.full((*size, *plane.shape), shape.poison, dtype=shape.dtype) for plane in planes)
    return tuple(
        torch.full((*size, plane.row_bytes), 0xFF, dtype=torch.uint8)
        .view(getattr(torch, plane.dtype))
        .view(*size, *plane.shape)
        for plane in planes
    )


def attention_bound(case: AttentionCase) -> float:
    """Of the float64 reference over the same cache."""
    bounds = QUANTIZED_ATTENTION_BOUND if is_quantized(case.kv[0].dtype) else ATTENTION_BOUND
    return bounds[case.q.dtype]


def code_step(rows: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring codes at values [..., head_dim] of a quantized cache."""
    scale = rows.abs().amax(-1, keepdim=True) / LIMITS[kv_dtype]
    return scale.expand_as(rows) if kv_dtype == torch.int8 else (rows.abs() / 8).maximum(scale / 512)


def projections(
    num_tokens: int, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, *, is_fused: bool
) -> list[torch.Tensor]:
    """q, k, v in [-1, 1]: slices of one fused projection, or tensors of their own."""
    sizes = [num_kv_heads * group * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = _uniform((num_tokens, sum(sizes)), torch.Generator().manual_seed(num_tokens), dtype)
    parts = [x if is_fused else x.contiguous() for x in fused.split(sizes, dim=1)]
    return [x.view(num_tokens, x.shape[1] // head_dim, head_dim) for x in parts]


def angles(head_dim: int) -> torch.Tensor:
    """[200, head_dim] float32: cos in the first half, sin in the second."""
    angle = torch.arange(200)[:, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def random_bits(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, NaN with payloads included."""
    size_bytes = (*size[:-1], size[-1] * dtype.itemsize)
    bits = torch.randint(256, size_bytes, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal also where NaN."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _queries(num_tokens: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    num_heads = shape.num_kv_heads * shape.group
    q = 3.0 * _uniform((num_tokens, num_heads + shape.is_sliced, shape.head_dim), generator, shape.dtype)
    return q.to(shape.device)[:, :num_heads]


def _uniform(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return (2.0 * torch.rand(size, generator=generator) - 1.0).to(dtype)
