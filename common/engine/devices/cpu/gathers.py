"""The gathers and masks that attention in torch operators repeats in every layer of a step.

Gathers read slots below a sequence's length only: what lies in unused slots (NaN included) never reaches a product.
"""

from dataclasses import dataclass
from functools import cached_property
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


class Gathers:
    """Made once per step; each part when a layer first asks for it."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the queries, which masks must share."""
        self.batch = batch
        self._dtype = dtype
        self._block_size = block_size
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def angles(self, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token, [num_tokens, 1, head_dim / 2] float32 each."""
        key = cos_sin.data_ptr()  # of a table that lives as long as the model
        if key not in self._angles:
            cos, sin = cos_sin[self.batch.positions].unsqueeze(1).chunk(2, dim=-1)
            self._angles[key] = cos, sin
        return self._angles[key]

    @cached_property
    def written_rows(self) -> torch.Tensor | None:
        """[num_written] int64: the tokens that have a slot; None = all of them."""
        is_slot = self.batch.slot_mapping >= 0
        return None if bool(is_slot.all()) else is_slot.nonzero().squeeze(1)

    @cached_property
    def written_slots(self) -> torch.Tensor:
        """[num_written] int64"""
        slots = self.batch.slot_mapping
        return slots if self.written_rows is None else slots[self.written_rows]

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The sequences with one new token."""
        lens = self.batch.seq_lens.tolist()
        decode = [seq for seq, (first, last) in enumerate(self._bounds) if last - first == 1]
        return [
            _decode_group(self.batch, seqs, self._block_size, self._dtype) for seqs in group_by_length(decode, lens)
        ]

    @cached_property
    def prefill_runs(self) -> list[PrefillRun]:
        """The sequences with more than one new token."""
        if self.batch.max_query_len <= 1:
            return []
        return [
            PrefillRun(first, last, self._slots_of(seq))
            for seq, (first, last) in enumerate(self._bounds)
            if last - first > 1
        ]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(self.batch.cu_seqlens_q.tolist()))

    def _slots_of(self, seq: int) -> torch.Tensor:
        tables, seq_len = self.batch.block_tables[seq : seq + 1], int(self.batch.seq_lens[seq])
        return slots_of(tables, seq_len, self._block_size).squeeze(0)


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
