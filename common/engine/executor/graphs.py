"""Decode steps replayed from CUDA graphs: one launch for a whole step instead of ten per layer.

Owns the tensors that graphs read their inputs from, and the graphs. A graph is for a number of sequences and a longest
length, both rounded up to powers of two; those of short sequences are captured at load, the others when a step first
needs them. A step whose capture failed is launched, then and later. All graphs leave their logits in one tensor. Rows
without a sequence have length 0 and no slot: kernels write nothing for them. Sampling stays outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.contract.device import Capture
from common.engine.executor.failures import shown
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import Decoder
from common.telemetry.logs import get_logger

NO_SLOT = -1
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
            *((slots, batch.slot_mapping, NO_SLOT) for slots, batch in zip(self.slot_mapping, batches, strict=True)),
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
        self._logits: torch.Tensor | None = None  # [max_num_seqs, vocab_size] float32
        # By number of rows and length. None: it could not be captured.
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], torch.Tensor] | None] = {}

    @property
    def num_graphs(self) -> int:
        """At most the powers of two up to both limits, multiplied."""
        return sum(graph is not None for graph in self._graphs.values())

    def warm_up(self) -> None:
        """Capture what short sequences need, before anybody waits for it. Writes no KV."""
        self._inputs.slot_mapping.fill_(NO_SLOT)
        length = min(MIN_LEN, self._max_len)
        for num_rows in sorted(
            {min(1 << bit, self._max_num_seqs) for bit in range(self._max_num_seqs.bit_length() + 1)}
        ):
            self._graph((num_rows, length))

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
        graph = self._graph(key)
        if graph is None:
            return self._forward(*key)[:count]
        replay, logits = graph
        replay()
        return logits[:count]

    def _graph(self, key: tuple[int, int]) -> tuple[Callable[[], None], torch.Tensor] | None:
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(lambda: self._forward(*key))
            except RuntimeError as error:  # no memory, or what cannot be recorded; a broken device shows when launched
                self._graphs[key] = None
                get_logger().warning("step_not_captured", num_rows=key[0], max_len=key[1], error=shown(error))
        return self._graphs[key]

    def _forward(self, num_rows: int, max_seq_len: int) -> torch.Tensor:
        """Logits in the tensor that all steps share."""
        inputs = self._inputs
        batches = self._cache.by_layer(inputs.batches(num_rows, max_seq_len))
        rows = inputs.rows[:num_rows]
        logits = self._model.forward(inputs.token_ids[:num_rows], batches, self._cache.layers, rows)
        if self._logits is None:
            self._logits = logits.new_empty((self._max_num_seqs, logits.shape[1]))
        return self._logits[:num_rows].copy_(logits)


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()
