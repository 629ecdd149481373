"""The gathers and masks that attention in torch operators repeats in every layer of a step.

Gathers read slots below a sequence's length and within the window only: what lies in unused slots and in blocks behind
the window, which another sequence may have by now (NaN included), never reaches a product.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.contract.kv_spec import first_token_needed

# Decode rows are attended together while the longest is at most this many times the shortest: padding is bounded.
MAX_LENGTH_RATIO = 2
ALWAYS_TOGETHER_LEN = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, and the tokens that it sees, padded to the most of them."""

    rows: torch.Tensor  # [num_seqs] int64: their tokens in the flattened axis
    slots: torch.Tensor  # [num_seqs, max_len] int64: padding repeats the first
    mask: torch.Tensor  # [num_seqs, 1, 1, max_len]: 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Several new tokens of one sequence: flattened tokens [first_row, last_row)."""

    first_row: int
    last_row: int
    slots: torch.Tensor  # [num_visible] int64: of all tokens that one of them sees


class Gathers:
    """Made once per step and group of layers; each part when a layer first asks for it."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the queries, which masks must share."""
        self.batch = batch
        self._dtype = dtype
        self._block_size = block_size
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._decode_groups: dict[int, list[DecodeGroup]] = {}  # by window
        self._prefill_runs: dict[int, list[PrefillRun]] = {}

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

    def decode_groups(self, window: int) -> list[DecodeGroup]:
        """The sequences with one new token. `window`: as in `AttentionOptions`."""
        if window not in self._decode_groups:
            lens = [min(length, window or length) for length in self.batch.seq_lens.tolist()]
            decode = [seq for seq, (first, last) in enumerate(self._bounds) if last - first == 1]
            self._decode_groups[window] = [
                _decode_group(self.batch, seqs, self._block_size, self._dtype, window)
                for seqs in group_by_length(decode, lens)
            ]
        return self._decode_groups[window]

    def prefill_runs(self, window: int) -> list[PrefillRun]:
        """The sequences with more than one new token."""
        if self.batch.max_query_len <= 1:
            return []
        if window not in self._prefill_runs:
            self._prefill_runs[window] = [
                PrefillRun(first, last, self._slots_of(seq, last - first, window))
                for seq, (first, last) in enumerate(self._bounds)
                if last - first > 1
            ]
        return self._prefill_runs[window]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(self.batch.cu_seqlens_q.tolist()))

    def _slots_of(self, seq: int, num_new: int, window: int) -> torch.Tensor:
        """Of all tokens that one of the last `num_new` sees."""
        seq_len = int(self.batch.seq_lens[seq])
        first = first_token_needed(seq_len - num_new, window)
        return _slots_at(self.batch.block_tables[seq : seq + 1], torch.arange(first, seq_len)[None], self._block_size)[
            0
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


def _slots_at(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of `positions` [num_seqs, count] int64 of the sequences whose tables these are: the same shape."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _decode_group(
    batch: AttentionBatch, seqs: list[int], block_size: int, dtype: torch.dtype, window: int
) -> DecodeGroup:
    index = torch.tensor(seqs)
    seq_lens = batch.seq_lens[index].long()
    lens = seq_lens.clamp(max=window) if window else seq_lens
    offsets = torch.arange(int(lens.max()))
    is_padding = offsets >= lens.unsqueeze(1)
    positions = (seq_lens - lens).unsqueeze(1) + offsets.masked_fill(is_padding, 0)
    mask = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))
    return DecodeGroup(
        rows=batch.cu_seqlens_q[index].long(),
        slots=_slots_at(batch.block_tables[index], positions, block_size),
        mask=mask[:, None, None, :],
    )
