"""One run of tokens that a worker computes: its facts and what follows from them. Pure: no IO.

    WAITING --admitted: it has blocks--> RUNNING --dropped--> ENDED (its blocks go when no step computes it)
       ^                                    |
       +-------------preempted--------------+
       ^                                    |
       +------resumed------ PARKED <------parked: all of its tokens are computed, and what follows is not decided

A WAITING sequence has blocks when it was given some with its prompt, and none when it is new or was preempted: then
all of its tokens but a cached prefix are computed, as a prefill. RUNNING ones have blocks for every computed token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from common.engine.contract.plan import SampleSpec, ScheduledSequence, ScoreSpec, draft_specs, sample_spec
from common.values.hashing import extend_block_hashes
from common.values.ids import BlockHash
from common.values.request import SampledToken, TokenEvent, Work


class SequencePhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ENDED = "ended"


# In a block table: nothing there, as no token that is still to be computed reads it, or not yet.
NO_BLOCK = -1
# One block table per group of layers; empty = no blocks at all.
BlockTableSet = tuple[tuple[int, ...], ...]
# (priority, order of arrival, choice): the smallest goes first, the largest is preempted first.
Rank = tuple[int, int, int]


@dataclass(slots=True)
class HashChain:
    """Hashes of the leading full blocks of some tokens, as far as they were needed."""

    root: BlockHash
    blocks: list[BlockHash]

    def extend(self, token_ids: list[int], block_size: int) -> None:
        extend_block_hashes(self.blocks, token_ids, block_size, self.root)

    def copy(self) -> "HashChain":
        return HashChain(self.root, list(self.blocks))


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler moves `phase`, `block_tables` and the counts; the core appends tokens."""

    sequence_id: int
    work: Work
    choices: tuple[int, ...]  # drawn together at the end of the prompt; one each afterwards
    rank: Rank
    token_ids: list[int]  # prompt and output
    hashes: HashChain
    block_tables: BlockTableSet = ()
    num_cached_tokens: int = 0  # found in the prefix cache when it got its blocks; before that an estimate
    num_computed: int = 0  # tokens whose KV is in place; < len(token_ids) while it can be scheduled
    num_scheduled: int = 0  # tokens in the running step, drafts included; 0 = not part of it
    draft_token_ids: tuple[int, ...] = ()  # guesses at what follows `token_ids`, in the running step
    num_scored: int = 1  # leading prompt tokens whose logprobs are told, where they are wanted; the first has none
    num_overtaken: int = 0  # admissions of later sequences while this one found no blocks
    phase: SequencePhase = SequencePhase.WAITING

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be drawn; without blocks, as far as known."""
        return len(self.token_ids) - (self.num_computed if self.block_tables else self.num_cached_tokens)

    @property
    def is_scoring(self) -> bool:
        """Logprobs of its prompt are wanted and not all are told."""
        return self.work.num_prompt_logprobs is not None and self.num_scored < self.work.num_prompt_tokens

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV is enough: nobody wants their logits."""
        return self.num_scored - 1 if self.is_scoring else len(self.token_ids) - 1

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1

    @property
    def is_ended(self) -> bool:
        return self.phase is SequencePhase.ENDED

    def next_event(self, choice_idx: int, token: SampledToken) -> TokenEvent:
        """`token` as the next one of a choice; with it, the choice may be finished."""
        position = len(self.token_ids) - self.work.num_prompt_tokens
        finish_reason = self.work.sampling.finish_reason(token.token_id, position + 1)
        return TokenEvent(choice_idx, position, token, finish_reason)

    def scheduled(self) -> ScheduledSequence:
        """What the running step does with it."""
        end = self.num_computed + self.num_scheduled - len(self.draft_token_ids)
        return ScheduledSequence(
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids[self.num_computed : end]),
            start=self.num_computed,
            block_tables=_as_planned(self.block_tables),
            samples=self._samples() if end == len(self.token_ids) else (),
            scores=self._scores(end) if self.is_scoring else None,
            draft_token_ids=self.draft_token_ids,
            adapter=self.work.adapter.digest,
        )

    def _samples(self) -> tuple[SampleSpec, ...]:
        if self.draft_token_ids:
            (choice,) = self.choices
            return draft_specs(self.work, choice, self.token_ids, self.draft_token_ids)
        return tuple(sample_spec(self.work, choice, self.token_ids) for choice in self.choices)

    def _scores(self, end: int) -> ScoreSpec | None:
        """Those of the tokens that follow the scheduled ones, up to the one at `end`."""
        start, last = max(self.num_computed + 1, self.num_scored), min(end + 1, self.work.num_prompt_tokens)
        if start >= last:
            return None
        return ScoreSpec(start, tuple(self.token_ids[start:last]), self.work.num_prompt_logprobs or 0)

    def __str__(self) -> str:
        choices = ",".join(map(str, self.choices))
        num_blocks = sum(len(table) - table.count(NO_BLOCK) for table in self.block_tables)
        counts = f"computed {self.num_computed}/{len(self.token_ids)} in {num_blocks} blocks"
        return f"sequence {self.sequence_id} of {self.work.attempt_id} choice {choices} {self.phase} {counts}"


def by_tenant(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    """Each tenant's, in the order given."""
    lines: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        lines.setdefault(sequence.work.tenant, []).append(sequence)
    return lines


def _as_planned(tables: BlockTableSet) -> BlockTableSet:
    """Where no block is any more, some block: it is not read, and no number is out of range."""
    for table in tables:
        if table[0] == NO_BLOCK:
            return tuple(tuple(max(block, 0) for block in table) for table in tables)
    return tables
