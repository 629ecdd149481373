"""Continuous batching: which sequences compute which tokens in the next step, and in which blocks. Pure: no IO.

Owns the sequences' places (waiting, running) and their references on blocks. Per step:
1. Waiting sequences take free slots by rank. One without blocks (preempted) needs them for all of its tokens first;
   those that have theirs may pass it.
2. Every running sequence that needs one token gets it, by rank. When it starts a new block, or writes the shared last
   block of a forked prompt, it needs a block; when none is available the youngest sequence with blocks is preempted,
   never an older one and never a reservation. Without a victim it sits out the step.
3. What is left of the token budget goes to prefill chunks, by rank, within what `ChunkBudget` grants.

Progress: the oldest running sequence can take every block but the reserved ones, and reservations end by themselves.
"""

from dataclasses import dataclass
from typing import Self

from common.engine.contract.plan import StepPlan
from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.config import WorkerConfig
from common.values.hashing import extend_block_hashes
from common.values.ids import BlockHash
from decode_worker.chunk_budget import ChunkBudget
from decode_worker.sequence import Rank, Sequence, SequencePhase

# Share of the pool that newcomers leave free, so that running sequences can grow without preempting at once.
WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds of one step (tokens, sequences, gaps of its streams), of the queue, and of an idle reservation."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int
    reservation_timeout_s: float = 120.0
    gap_budget_s: float = 0.0

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        bounds = config.max_num_batched_tokens, config.max_num_seqs, config.max_num_waiting
        return cls(*bounds, gap_budget_s=config.gap_budget_s)


class DecodeScheduler:
    """Plans one step at a time: `schedule`, then `finish_step` or `fail_step`."""

    def __init__(self, pool: BlockPool, limits: DecodeLimits) -> None:
        self._pool = pool
        self._limits = limits
        self.chunk_budget = ChunkBudget(limits.gap_budget_s, limits.max_num_batched_tokens)
        # Never more sequences than tokens in a step: so a prefill chunk always finds room beside the decoding ones.
        self._max_num_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._in_step: list[Sequence] = []
        self._copies: list[tuple[int, int]] = []
        self._num_steps = 0
        self.num_preemptions = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def in_step(self) -> tuple[Sequence, ...]:
        """The sequences of the running step; ENDED ones included."""
        return tuple(self._in_step)

    @property
    def step_id(self) -> int | None:
        """The running step, or None between steps."""
        return self._num_steps if self._in_step else None

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast a prompt would be computed beside what runs now; 0.0 until one was."""
        return self.chunk_budget.prefill_tokens_per_s(sum(sequence.is_decoding for sequence in self._running))

    @property
    def is_short_of_blocks(self) -> bool:
        """Some sequence was preempted and waits for blocks: newcomers must not take them."""
        return any(not sequence.block_table for sequence in self._waiting)

    # ---- blocks of newcomers ------------------------------------------------------------------------

    def match(self, hashes: list[BlockHash], num_tokens: int) -> list[int]:
        """Cached leading blocks of `num_tokens` tokens; never that of the last one, whose logits must be computed."""
        return self._pool.match_prefix(hashes[: (num_tokens - 1) // self._pool.block_size])

    def reserve(self, hit: list[int], num_tokens: int, kind: RefKind) -> tuple[int, ...] | None:
        """A block table for `num_tokens` tokens that starts with `hit`; None when there are too few blocks."""
        stats = self._pool.stats()
        is_empty = stats.used == stats.held == 0
        watermark = 0 if is_empty else max(int(WATERMARK * stats.total), len(self._running))
        self._pool.acquire(hit, kind)
        num_fresh = self._pool.num_blocks_for(num_tokens) - len(hit)
        has_room = self._pool.num_available - num_fresh >= watermark
        fresh = self._pool.allocate(num_fresh, kind) if has_room else None
        if fresh is None:
            self._pool.release(hit, kind)
            return None
        return (*hit, *fresh)

    # ---- sequences ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take over a WAITING sequence and its USED blocks; what is computed already becomes findable."""
        assert sequence.phase is SequencePhase.WAITING
        self._register(sequence, 0)
        self._waiting.append(sequence)

    def fork(self, source: Sequence, sequence_id: int, choice_idx: int, rank: Rank) -> Sequence:
        """Another sequence with the tokens and blocks of `source`; shared until one of them writes."""
        assert source.num_scheduled == 0
        self._pool.acquire(source.block_table, RefKind.USED)
        fork = Sequence(
            sequence_id=sequence_id,
            work=source.work,
            choices=(choice_idx,),
            rank=rank,
            hash_root=source.hash_root,
            token_ids=list(source.token_ids),
            hashes=list(source.hashes),
            block_table=source.block_table,
            num_computed=source.num_computed,
        )
        self._waiting.append(fork)
        return fork

    def drop(self, sequence: Sequence) -> None:
        """End a sequence. Its blocks go now, or when the step that computes it ends."""
        assert sequence.phase is not SequencePhase.ENDED, f"drop of {sequence}"
        (self._waiting if sequence.phase is SequencePhase.WAITING else self._running).remove(sequence)
        sequence.phase = SequencePhase.ENDED
        if sequence.num_scheduled == 0:
            self._release(sequence)

    # ---- steps --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Fill the next step; None when nothing can be computed now."""
        assert not self._in_step
        num_preemptions = self.num_preemptions
        self._fill()
        if not self._in_step and self.num_preemptions > num_preemptions:
            self._fill()  # who sat out has made room for an older one
        if not self._in_step:
            return None
        self._num_steps += 1
        copies, self._copies = tuple(self._copies), []
        return StepPlan(self._num_steps, tuple(sequence.scheduled() for sequence in self._in_step), copies)

    def finish_step(self, untrusted: set[int], duration_s: float) -> list[Sequence]:
        """The step's tokens are computed; its sequences that have not ended meanwhile.

        Full blocks become findable, except those of the `untrusted` sequence ids: nothing of theirs is used again.
        """
        in_step, self._in_step = self._in_step, []
        prefills = [sequence.num_scheduled for sequence in in_step if not sequence.is_decoding]
        self.chunk_budget.add(sum(prefills), len(in_step) - len(prefills), duration_s)
        for sequence in in_step:
            start = sequence.num_computed
            sequence.num_computed += sequence.num_scheduled
            sequence.num_scheduled = 0
            if sequence.sequence_id in untrusted:
                self._pool.unregister(sequence.block_table)
            else:
                self._register(sequence, start)
        return self._without_ended(in_step)

    def fail_step(self) -> list[Sequence]:
        """Nothing of the step counts; its sequences that have not ended meanwhile."""
        in_step, self._in_step = self._in_step, []
        for sequence in in_step:
            sequence.num_scheduled = 0
        return self._without_ended(in_step)

    # ---- private ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._admit()
        self._running.sort(key=_rank)
        budget = self._limits.max_num_batched_tokens
        for sequence in tuple(self._running):
            if sequence.phase is SequencePhase.RUNNING and sequence.is_decoding and self._can_write(sequence):
                budget -= self._take(sequence, budget)
        budget = min(budget, self.chunk_budget.chunk_tokens(len(self._in_step)))
        for sequence in self._running:
            if not sequence.is_decoding and budget > 0:
                budget -= self._take(sequence, budget)

    def _take(self, sequence: Sequence, budget: int) -> int:
        sequence.num_scheduled = min(sequence.num_remaining, budget)
        self._in_step.append(sequence)
        return sequence.num_scheduled

    def _admit(self) -> None:
        """WAITING -> RUNNING by rank, while there are slots."""
        self._waiting.sort(key=_rank)
        may_allocate = True
        for sequence in tuple(self._waiting):
            if len(self._running) >= self._max_num_running:
                return
            if not sequence.block_table:
                may_allocate = may_allocate and self._allocate_all(sequence)
                if not may_allocate:
                    continue
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.phase = SequencePhase.RUNNING

    def _allocate_all(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a preempted sequence, cached ones where they still are."""
        extend_block_hashes(sequence.hashes, sequence.token_ids, self._pool.block_size, sequence.hash_root)
        hit = self.match(sequence.hashes, len(sequence.token_ids))
        block_table = self.reserve(hit, len(sequence.token_ids), RefKind.USED)
        if block_table is None:
            return False
        sequence.block_table = block_table
        sequence.num_computed = len(hit) * self._pool.block_size
        return True

    def _can_write(self, sequence: Sequence) -> bool:
        """See to it that the next position has a block of this sequence's own; False = sit out this step."""
        idx = sequence.num_computed // self._pool.block_size
        is_new = idx == len(sequence.block_table)
        while is_new or self._pool.is_shared(sequence.block_table[idx]):
            fresh = self._pool.allocate(1, RefKind.USED)
            if fresh is not None:
                self._put_block(sequence, idx, fresh[0])
                return True
            if not self._preempt_youngest_after(sequence):
                self._yield_to_older(sequence)
                return False
        return True

    def _put_block(self, sequence: Sequence, idx: int, block: int) -> None:
        """`block` becomes the last of the table, or the own copy of a shared one."""
        if idx < len(sequence.block_table):
            source = sequence.block_table[idx]
            self._copies.append((source, block))
            self._pool.release((source,), RefKind.USED)
        sequence.block_table = (*sequence.block_table[:idx], block)

    def _preempt_youngest_after(self, sequence: Sequence) -> bool:
        victims = [s for s in (*self._waiting, *self._running) if s.block_table and s.rank > sequence.rank]
        if not victims:
            return False
        self._preempt(max(victims, key=_rank))
        return True

    def _yield_to_older(self, sequence: Sequence) -> None:
        """With few slots an older sequence may wait for one, on the very blocks that this one lacks."""
        if any(other.block_table and other.rank < sequence.rank for other in self._waiting):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """RUNNING or WAITING -> WAITING without blocks. Its tokens stay; what the client has is never repeated."""
        assert sequence.num_scheduled == 0, f"preemption of scheduled {sequence}"
        self._release(sequence)
        sequence.num_computed = 0
        self.num_preemptions += 1
        if sequence.phase is SequencePhase.RUNNING:
            self._running.remove(sequence)
            self._waiting.append(sequence)
            sequence.phase = SequencePhase.WAITING

    def _register(self, sequence: Sequence, start: int) -> None:
        """Full blocks whose last token stands at `start` or later become findable."""
        size = self._pool.block_size
        first, end = start // size, sequence.num_computed // size
        if first == end:
            return
        extend_block_hashes(sequence.hashes, sequence.token_ids, size, sequence.hash_root)
        for idx in range(first, end):
            self._pool.register(sequence.block_table[idx], sequence.hashes[idx])

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table, RefKind.USED)
        sequence.block_table = ()

    def _without_ended(self, sequences: list[Sequence]) -> list[Sequence]:
        for sequence in sequences:
            if sequence.phase is SequencePhase.ENDED:
                self._release(sequence)
        return [sequence for sequence in sequences if sequence.phase is not SequencePhase.ENDED]


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
