"""Decode steps replayed from CUDA graphs: one launch for a whole step instead of ten per layer.

Owns the tensors that graphs read their inputs from, and the graphs. A graph is for a number of sequences and a longest
length, both rounded up to powers of two, and is captured when a step first needs it. Rows without a sequence have
length 0 and no slot: kernels write nothing for them. Sampling stays outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.contract.device import Capture
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import Decoder

MIN_LEN = 1024  # shorter sequences are few splits of the decode kernel anyway


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a graph reads: rows of sequences in use, then rows without one. As in `AttentionBatch`, where slots and
    tables have a first axis for the groups of layers."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def empty(cls, num_groups: int, max_num_seqs: int, max_blocks: int, device: torch.device | str) -> "StepInputs":
        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows = torch.arange(max_num_seqs + 1, device=device)
        return cls(
            token_ids=zeros(max_num_seqs, dtype=torch.int64),
            positions=zeros(max_num_seqs, dtype=torch.int64),
            slot_mapping=zeros(num_groups, max_num_seqs, dtype=torch.int64),
            cu_seqlens_q=rows.to(torch.int32),
            seq_lens=zeros(max_num_seqs, dtype=torch.int32),
            block_tables=zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32),
            rows=rows,
        )

    def fill(self, token_ids: torch.Tensor, batches: Sequence[AttentionBatch], num_rows: int) -> None:
        """Copy a step's inputs, and make the rows behind them, up to `num_rows`, rows without a sequence."""
        count, width = batches[0].block_tables.shape
        for target, source, padding in (
            (self.token_ids, token_ids, 0),
            (self.positions, batches[0].positions, 0),
            (self.seq_lens, batches[0].seq_lens, 0),
            *((slots, batch.slot_mapping, -1) for slots, batch in zip(self.slot_mapping, batches, strict=True)),
        ):
            target[:count].copy_(source)
            target[count:num_rows].fill_(padding)
        for tables, batch in zip(self.block_tables, batches, strict=True):
            tables[:count, :width].copy_(batch.block_tables)

    def batches(self, num_rows: int, max_seq_len: int) -> list[AttentionBatch]:
        """Views for `num_rows` sequences of one new token each, one for each group."""
        return [
            AttentionBatch(
                self.positions[:num_rows],
                slots[:num_rows],
                self.cu_seqlens_q[: num_rows + 1],
                self.seq_lens[:num_rows],
                tables[:num_rows],
                1,
                max_seq_len,
            )
            for slots, tables in zip(self.slot_mapping, self.block_tables, strict=True)
        ]


class DecodeGraphs:
    """One step at a time, from the compute thread."""

    def __init__(self, model: Decoder, cache: KVCache, max_num_seqs: int, max_len: int, capture: Capture) -> None:
        self._model = model
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_len = max_len
        self._capture = capture
        max_blocks = -(-max_len // cache.block_size)
        self._inputs = StepInputs.empty(len(cache.spec.groups), max_num_seqs, max_blocks, cache.device)
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], torch.Tensor]] = {}

    @property
    def num_graphs(self) -> int:
        """At most the powers of two up to both limits, multiplied."""
        return len(self._graphs)

    def can_run(self, batch: AttentionBatch) -> bool:
        """Single tokens of not too many and not too long sequences."""
        count = batch.seq_lens.shape[0]
        return batch.max_query_len == 1 and count <= self._max_num_seqs and batch.max_seq_len <= self._max_len

    def run(self, token_ids: torch.Tensor, batches: Sequence[AttentionBatch]) -> torch.Tensor:
        """Logits [num_seqs, vocab_size] float32 of a step that can run; valid until the next call.

        `batches`: one for each group of the cache.
        """
        count, longest = batches[0].seq_lens.shape[0], batches[0].max_seq_len
        key = min(_round_up(count), self._max_num_seqs), min(max(MIN_LEN, _round_up(longest)), self._max_len)
        self._inputs.fill(token_ids, batches, key[0])
        if key not in self._graphs:
            self._graphs[key] = self._capture(lambda: self._forward(*key))
        replay, logits = self._graphs[key]
        replay()
        return logits[:count]

    def _forward(self, num_rows: int, max_seq_len: int) -> torch.Tensor:
        inputs = self._inputs
        batches = self._cache.by_layer(inputs.batches(num_rows, max_seq_len))
        return self._model.forward(inputs.token_ids[:num_rows], batches, self._cache.layers, inputs.rows[:num_rows])


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()
