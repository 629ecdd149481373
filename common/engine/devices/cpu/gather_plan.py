"""Turns an AttentionBatch into the gathers and masks that the cpu backend repeats in every layer of a step.

Gathers read slots below a sequence's length only: what lies in unused slots (NaN included) never reaches a product.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from common.engine.contract.attention import AttentionBatch

# Decode rows are attended together while the longest is at most this many times the shortest: padding is bounded.
MAX_LENGTH_RATIO = 2
ALWAYS_TOGETHER_LEN = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, padded to the longest of them."""

    rows: torch.Tensor  # [num_seqs] int64: their tokens in the flattened axis
    slots: torch.Tensor  # [num_seqs, max_len] int64: padding repeats the sequence's first slot
    lens: torch.Tensor  # [num_seqs] int64: tokens of each sequence
    mask: torch.Tensor  # [num_seqs, 1, 1, max_len]: 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Several new tokens of one sequence: flattened tokens [first_row, last_row)."""

    first_row: int
    last_row: int
    slots: torch.Tensor  # [seq_len] int64


@dataclass(frozen=True, slots=True)
class CpuPlan:
    cos: torch.Tensor  # [num_tokens, 1, head_dim / 2] float32
    sin: torch.Tensor
    written_rows: torch.Tensor | None  # tokens that have a slot; None = all of them
    written_slots: torch.Tensor  # [num_written] int64
    decode_groups: list[DecodeGroup]
    prefill_runs: list[PrefillRun]


def plan_batch(batch: AttentionBatch, cos_sin: torch.Tensor, block_size: int, dtype: torch.dtype) -> CpuPlan:
    """`dtype` is that of the queries, which masks must share."""
    cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
    starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    num_new = [after - before for before, after in pairwise(starts)]
    decode = [seq for seq, count in enumerate(num_new) if count == 1]
    is_slot = batch.slot_mapping >= 0
    written_rows = None if bool(is_slot.all()) else is_slot.nonzero().squeeze(1)
    return CpuPlan(
        cos=cos,
        sin=sin,
        written_rows=written_rows,
        written_slots=batch.slot_mapping if written_rows is None else batch.slot_mapping[written_rows],
        decode_groups=[_decode_group(batch, seqs, block_size, dtype) for seqs in group_by_length(decode, lens)],
        prefill_runs=prefill_runs(batch, block_size),
    )


def prefill_runs(batch: AttentionBatch, block_size: int) -> list[PrefillRun]:
    """The sequences with more than one new token."""
    if batch.max_query_len <= 1:
        return []
    bounds = list(pairwise(batch.cu_seqlens_q.tolist()))
    return [
        _prefill_run(batch, seq, first, last - first, block_size)
        for seq, (first, last) in enumerate(bounds)
        if last - first > 1
    ]


def group_by_length(seqs: list[int], lens: list[int]) -> list[list[int]]:
    """Cut the sequences, ordered by length, where padding would more than double the work."""
    groups: list[list[int]] = []
    for seq in sorted(seqs, key=lambda seq: (lens[seq], seq)):
        if groups and lens[seq] <= max(ALWAYS_TOGETHER_LEN, MAX_LENGTH_RATIO * lens[groups[-1][0]]):
            groups[-1].append(seq)
        else:
            groups.append([seq])
    return groups


def slots_of(block_tables: torch.Tensor, num_positions: int, block_size: int) -> torch.Tensor:
    """Slots of positions [0, num_positions) for each row of `block_tables`: [num_seqs, num_positions] int64."""
    offsets = torch.arange(block_size)
    num_blocks = -(-num_positions // block_size)
    slots = block_tables[:, :num_blocks].long().unsqueeze(2) * block_size + offsets
    return slots.flatten(1)[:, :num_positions]


def _decode_group(batch: AttentionBatch, seqs: list[int], block_size: int, dtype: torch.dtype) -> DecodeGroup:
    index = torch.tensor(seqs)
    lens = batch.seq_lens[index].long()
    max_len = int(lens.max())
    slots = slots_of(batch.block_tables[index], max_len, block_size)
    is_padding = torch.arange(max_len) >= lens.unsqueeze(1)
    mask = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))
    return DecodeGroup(
        rows=batch.cu_seqlens_q[index].long(),
        slots=torch.where(is_padding, slots[:, :1], slots),
        lens=lens,
        mask=mask[:, None, None, :],
    )


def _prefill_run(batch: AttentionBatch, seq: int, first_row: int, num_new: int, block_size: int) -> PrefillRun:
    seq_len = int(batch.seq_lens[seq])
    slots = slots_of(batch.block_tables[seq : seq + 1], seq_len, block_size).squeeze(0)
    return PrefillRun(first_row, first_row + num_new, slots)
