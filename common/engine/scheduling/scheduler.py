"""Which sequences compute which tokens in the next step: the mechanism that both roles share. Pure: no IO.

Owns the sequences' places (waiting, running, in the running step) and, through `BlockTables`, their blocks. A `Policy`
decides the order: it is asked once per step, and fills the step with its verbs: `admit`, `decode`, `prefill`, `draft`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, Self

from common.engine.contract.plan import SequenceResult, StepPlan, StepResult
from common.engine.scheduling.block_tables import BlockTables, PoolGroup
from common.engine.scheduling.sequence import BlockTableSet, HashChain, Rank, Sequence, SequencePhase
from common.engine.scheduling.step_rate import StepRate
from common.values.config import WorkerConfig
from common.values.request import Work

# Prompt tokens of a step whose logprobs are told: the logits of a whole vocabulary are there for each of them at once
# (256 of 150,000 in float32 are 154 MB).
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of the queue. Of a step: tokens, sequences, time beside running streams (0 = as long as it
    takes), drafts per sequence (0 = none)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int
    gap_budget_s: float = 0.0
    max_draft_tokens: int = 0

    @property
    def max_num_queued(self) -> int:
        """Sequences that run and wait."""
        return self.max_num_seqs + self.max_num_waiting

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        bounds = config.max_num_batched_tokens, config.max_num_seqs, config.max_num_waiting
        max_draft_tokens = config.max_draft_tokens if config.speculation == "ngram" else 0
        return cls(*bounds, gap_budget_s=config.gap_budget_s, max_draft_tokens=max_draft_tokens)


class Policy(Protocol):
    """The order and the pace of one role. `watermark`: see BlockTables."""

    watermark: float

    def fill(self, scheduler: "Scheduler") -> None:
        """Put sequences into the step that begins, most urgent first."""
        ...


class Scheduler:
    """Plans one step at a time: `schedule`, then `finish_step` or `fail_step`."""

    def __init__(self, groups: Many[PoolGroup], limits: Limits, policy: Policy, hash_fields: Mapping[str, str]) -> None:
        self.blocks = BlockTables(groups, policy.watermark, hash_fields, limits.max_num_batched_tokens)
        self.limits = limits
        self.rate = StepRate()
        self.num_preemptions = 0
        self._policy = policy
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._parked: list[Sequence] = []
        self._in_step: list[Sequence] = []
        self._copies: list[tuple[int, int, int]] = []
        self._num_steps = 0
        self._num_sequences = 0
        self._num_left = 0  # tokens that the step being filled has room for
        self._num_scores_left = 0  # and of those, tokens whose logprobs are told
        self._num_decoding = 0  # sequences of the step that compute one token after their last draw
        self._num_drafts = 0  # tokens of the step that are guesses

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def parked(self) -> tuple[Sequence, ...]:
        return tuple(self._parked)

    @property
    def idle_with_blocks(self) -> list[Sequence]:
        """Waiting and parked ones that keep theirs."""
        return [sequence for sequence in (*self._waiting, *self._parked) if sequence.block_tables]

    @property
    def in_step(self) -> tuple[Sequence, ...]:
        """The sequences of the running step; ENDED ones included."""
        return tuple(self._in_step)

    @property
    def step_id(self) -> int | None:
        """The running step, or None between steps."""
        return self._num_steps if self._in_step else None

    @property
    def is_full(self) -> bool:
        """There are as many sequences as may run and wait."""
        return len(self._waiting) + len(self._running) + len(self._parked) >= self.limits.max_num_queued

    @property
    def is_short_of_blocks(self) -> bool:
        """Some sequence waits for blocks."""
        return any(not sequence.block_tables for sequence in self._waiting)

    # ---- sequences ----------------------------------------------------------------------------------

    def add(
        self, work: Work, hashes: HashChain, rank: Rank, block_tables: BlockTableSet = (), num_computed: int = 0
    ) -> Sequence:
        """Queue a prompt. `block_tables` (USED) hold its first `num_computed` tokens, findable from now on."""
        sequence = Sequence(
            sequence_id=self._new_id(),
            work=work,
            choices=work.choices,
            rank=rank,
            token_ids=list(work.token_ids),
            hashes=hashes,
            block_tables=block_tables,
            num_computed=num_computed,
            num_scored=min(num_computed + 1, work.num_prompt_tokens),  # by whoever computed them
        )
        if block_tables:
            self.blocks.register_received(sequence)
        else:
            sequence.num_cached_tokens = self.blocks.match(hashes, sequence.num_reusable) * self.blocks.block_size
        self._waiting.append(sequence)
        return sequence

    def fork(self, source: Sequence, choice_idx: int, rank: Rank) -> Sequence:
        """Another sequence with the tokens and blocks of `source`."""
        assert source.num_scheduled == 0
        fork = Sequence(
            sequence_id=self._new_id(),
            work=source.work,
            choices=(choice_idx,),
            rank=rank,
            token_ids=list(source.token_ids),
            hashes=source.hashes.copy(),
            block_tables=self.blocks.share(source),
            num_computed=source.num_computed,
            num_scored=source.num_scored,
        )
        self._waiting.append(fork)
        return fork

    def drop(self, sequence: Sequence) -> None:
        """End a sequence. Its blocks go now, or when the step that computes it ends."""
        assert not sequence.is_ended, f"drop of {sequence}"
        self._place_of(sequence).remove(sequence)
        sequence.phase = SequencePhase.ENDED
        if sequence.num_scheduled == 0:
            self.blocks.release(sequence)

    def park(self, sequence: Sequence) -> None:
        """All of its tokens are computed, and what follows them is not decided yet: it keeps its blocks, as long as
        nobody needs them, and no place in the batch."""
        assert sequence.num_scheduled == 0, f"parking of scheduled {sequence}"
        self._move(sequence, SequencePhase.PARKED)

    def resume(self, sequence: Sequence) -> None:
        """It has a token more. One that has its blocks takes its place in the batch again, if that is still free."""
        if sequence.phase is SequencePhase.PARKED:
            has_room = len(self._running) < min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
            is_ready = sequence.block_tables and has_room
            self._move(sequence, SequencePhase.RUNNING if is_ready else SequencePhase.WAITING)

    # ---- steps --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Fill the next step; None when nothing can be computed now."""
        assert not self._in_step
        num_preemptions = self.num_preemptions
        self._fill()
        if not self._in_step and self.num_preemptions > num_preemptions:
            self._fill()  # a sequence that sat out has made room for an older one
        if not self._in_step:
            return None
        self._num_steps += 1
        copies, self._copies = tuple(self._copies), []
        return StepPlan(self._num_steps, tuple(sequence.scheduled() for sequence in self._in_step), copies)

    def finish_step(self, result: StepResult) -> list[tuple[Sequence, int, SequenceResult | None]]:
        """The step's tokens are computed: (sequence, number of tokens, what was drawn) of those that have not ended.

        Full blocks become findable at once; not so those of a sequence whose row has an error. Drafts do not count as
        computed: the caller appends what was drawn, and `settle`s where there were any.
        """
        rows = {row.sequence_id: row for row in result.results}
        self._measure(result)
        in_step, self._in_step = self._in_step, []
        finished = []
        for sequence in in_step:
            row = rows.get(sequence.sequence_id)
            num_tokens = sequence.num_scheduled - len(sequence.draft_token_ids)
            self._advance(sequence, num_tokens, is_trusted=row is None or row.error is None)
            if sequence.is_ended:
                self.blocks.release(sequence)
            else:
                finished.append((sequence, num_tokens, row))
        return finished

    def settle(self, sequence: Sequence, num_accepted: int) -> None:
        """Its draw of the finished step is in `token_ids`. The KV of that many accepted drafts counts as computed; what
        the others took is given back. Of a sequence that had no drafts there is nothing to settle."""
        assert num_accepted <= len(sequence.draft_token_ids), f"{num_accepted} drafts accepted of {sequence}"
        sequence.draft_token_ids = ()
        self.blocks.shrink(sequence)
        if num_accepted:
            self._advance(sequence, num_accepted, is_trusted=True)

    def fail_step(self) -> list[Sequence]:
        """Nothing of the step counts; its sequences that have not ended meanwhile."""
        in_step, self._in_step = self._in_step, []
        for sequence in in_step:
            sequence.num_scheduled = 0
            sequence.draft_token_ids = ()
            self.blocks.shrink(sequence)
            if sequence.is_ended:
                self.blocks.release(sequence)
        return [sequence for sequence in in_step if not sequence.is_ended]

    # ---- what a policy fills a step with ------------------------------------------------------------

    @property
    def num_decoding(self) -> int:
        """Sequences that `decode` has put into the step."""
        return self._num_decoding

    @property
    def num_left(self) -> int:
        """Tokens that the step has room for."""
        return self._num_left

    @property
    def has_room(self) -> bool:
        return self._num_left > 0 and len(self._in_step) < self.limits.max_num_seqs

    def is_awaited(self, sequence: Sequence) -> bool:
        """Parked siblings keep blocks until it is computed."""
        return bool(self._parked_siblings(sequence))

    def admit(self, sequence: Sequence) -> bool:
        """WAITING -> RUNNING; False when it has no blocks and there are too few for all of its tokens."""
        while not sequence.block_tables and not self.blocks.fill(sequence, len(self._running)):
            if not self._preempt_sibling_of(sequence):
                return False
        self._move(sequence, SequencePhase.RUNNING)
        return True

    def prefill(self, sequence: Sequence, max_tokens: int) -> int:
        """The next chunk of a prompt, as large as `max_tokens` and the step allow; how many tokens it has."""
        num_tokens = min(sequence.num_remaining, max_tokens, self._num_left)
        if sequence.is_scoring:  # one token at least: a sequence that was admitted is computed
            num_tokens = min(num_tokens, max(1, self._num_scores_left))
            self._num_scores_left -= num_tokens
        num_tokens = self.blocks.num_writable(sequence, num_tokens)
        if num_tokens > 0:
            self._take(sequence, num_tokens)
        return num_tokens

    def decode(self, sequence: Sequence) -> None:
        """Its one token. A new block, if it needs one, may come from the youngest sequence that has any, which is
        preempted: never an older one but a parked sibling, never a reservation. Without any it sits out the step."""
        while not self.blocks.can_write(sequence):
            copies = self.blocks.grow(sequence)
            if copies is not None:
                self._copies += copies
            elif not (self._preempt_youngest_after(sequence) or self._preempt_sibling_of(sequence)):
                self._yield_to_older(sequence)
                return
        self._num_decoding += 1
        self._take(sequence, 1)

    def draft(self, sequence: Sequence, token_ids: Many[int]) -> None:
        """Guesses at what follows the one token of a sequence of this step, as many as have room and free blocks."""
        assert sequence.num_scheduled == 1, f"drafts for {sequence}"
        num_tokens = min(len(token_ids), self._num_left)
        num_tokens = self.blocks.extend(sequence, num_tokens, len(self._running))
        sequence.draft_token_ids = tuple(token_ids[:num_tokens])
        sequence.num_scheduled += num_tokens
        self._num_left -= num_tokens
        self._num_drafts += num_tokens

    # ---- private ------------------------------------------------------------------------------------

    def _measure(self, result: StepResult) -> None:
        num_decoding, num_drafts = self._num_decoding, self._num_drafts
        num_prefill_tokens = self.limits.max_num_batched_tokens - self._num_left - num_decoding - num_drafts
        num_accepted = sum(len(run) - 1 for row in result.results for run in row.runs) if num_drafts else 0
        self.rate.add(num_prefill_tokens, num_decoding, result.duration_s, num_drafts, num_accepted)

    def _new_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    def _fill(self) -> None:
        self._num_left = self.limits.max_num_batched_tokens
        self._num_scores_left = MAX_SCORED_TOKENS
        self._num_decoding = self._num_drafts = 0
        self._policy.fill(self)

    def _take(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_scheduled = num_tokens
        self._in_step.append(sequence)
        self._num_left -= num_tokens

    def _preempt_youngest_after(self, sequence: Sequence) -> bool:
        victims = [
            s for s in (*self._waiting, *self._running, *self._parked) if s.block_tables and s.rank > sequence.rank
        ]
        if not victims:
            return False
        self._preempt(max(victims, key=lambda victim: victim.rank))
        return True

    def _preempt_sibling_of(self, sequence: Sequence) -> bool:
        """A parked one waits for its siblings: none of them may wait for its blocks."""
        siblings = self._parked_siblings(sequence)
        if siblings:
            self._preempt(max(siblings, key=lambda sibling: sibling.rank))
        return bool(siblings)

    def _parked_siblings(self, sequence: Sequence) -> list[Sequence]:
        return [s for s in self._parked if s.block_tables and s.work is sequence.work]

    def _yield_to_older(self, sequence: Sequence) -> None:
        """With few slots an older sequence, or one that it is parked for, may wait for one, on the very blocks that
        this one lacks."""
        if any(other.rank < sequence.rank for other in self.idle_with_blocks):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """RUNNING or WAITING -> WAITING without blocks; a PARKED one stays so. Its tokens stay; what the client has is
        never repeated."""
        assert sequence.num_scheduled == 0, f"preemption of scheduled {sequence}"
        self.blocks.release(sequence)
        sequence.num_computed = sequence.num_cached_tokens = 0
        self.num_preemptions += 1
        if sequence.phase is SequencePhase.RUNNING:
            self._move(sequence, SequencePhase.WAITING)

    def _move(self, sequence: Sequence, phase: SequencePhase) -> None:
        self._place_of(sequence).remove(sequence)
        sequence.phase = phase
        self._place_of(sequence).append(sequence)

    def _place_of(self, sequence: Sequence) -> list[Sequence]:
        """Of one that has not ended."""
        match sequence.phase:
            case SequencePhase.WAITING:
                return self._waiting
            case SequencePhase.RUNNING:
                return self._running
            case SequencePhase.PARKED:
                return self._parked
        raise AssertionError(f"{sequence} has no place")

    def _advance(self, sequence: Sequence, num_tokens: int, *, is_trusted: bool) -> None:
        start = sequence.num_computed
        sequence.num_computed = start + num_tokens
        sequence.num_scheduled = 0
        sequence.num_scored = max(sequence.num_scored, min(sequence.num_computed + 1, sequence.work.num_prompt_tokens))
        if is_trusted:
            self.blocks.register(sequence, start)
        else:
            self.blocks.distrust(sequence)
        self.blocks.move_windows(sequence)
