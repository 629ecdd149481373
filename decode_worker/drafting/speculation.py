"""How many drafts a step takes, and which. Pure: no IO.

A row more makes the step longer by what `RowTimes` measured, and the batch gains the chance that its draft is accepted.
Drafts are taken, most likely ones first, up to where tokens per second are most; none where the plain step has more. So
a batch that is bound by reading weights speculates, and one that is bound by computing does not; by measurement.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from common.engine.scheduling.row_times import RowTimes
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence
from decode_worker.drafting.acceptance import Acceptance
from decode_worker.drafting.answers import TenantAnswers
from decode_worker.drafting.drafter import NOTHING, Draft, Drafter, LookupDrafter

# Steps are made larger than any that was measured by so many rows, or by this share of the batch, at a time.
_PROBE_ROWS = 4
_PROBE_SHARE = 0.25
# Drafts have to promise at least so much more tokens per second: measured times are not exact.
_LEAST_GAIN = 1.03


@dataclass(slots=True)
class _Guessing:
    """One running sequence: what is proposed for it, and what came of that."""

    sequence: Sequence
    drafter: Drafter
    acceptance: Acceptance
    draft: Draft = field(default=NOTHING)
    num_tokens: int = 0  # that the sequence had when `draft` was proposed

    def propose(self, max_tokens: int) -> None:
        """Learn from the last proposal, and make the next."""
        came = self.sequence.token_ids[self.num_tokens :]
        self.acceptance.learn(self.draft.token_ids, self.draft.num_matching, came)
        draft = self.drafter.propose(max_tokens)
        self.draft = Draft(_fitting(draft.token_ids, self.sequence), draft.num_matching)
        self.num_tokens = len(self.sequence.token_ids)


class Speculation:
    """Drafts for the decoding sequences of a worker; `max_draft_tokens` for each at most."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = Acceptance()
        self._answers = TenantAnswers()
        self._guessing: dict[int, _Guessing] = {}

    def fill(self, scheduler: Scheduler) -> None:
        """Add drafts to a step that is otherwise full, and has nothing but sequences that decode."""
        sequences = scheduler.in_step
        if len(sequences) > scheduler.num_decoding or not self._can_pay(scheduler):
            return
        guessing = [self._guessing_of(sequence) for sequence in sequences if _has_output(sequence)]
        for each in guessing:
            each.propose(self._max_draft_tokens)
        for each, num_drafts in zip(guessing, self._choose(guessing, scheduler), strict=True):
            if num_drafts:
                scheduler.draft(each.sequence, each.draft.token_ids[:num_drafts])
        if len(self._guessing) > 2 * len(sequences):
            self._guessing = {key: each for key, each in self._guessing.items() if not each.sequence.is_ended}

    def ended(self, sequence: Sequence) -> None:
        """A choice has all of its tokens: others may draft from it."""
        self._guessing.pop(sequence.sequence_id, None)
        self._answers.of(sequence.work).add(sequence.token_ids[sequence.work.num_prompt_tokens :])

    def _can_pay(self, scheduler: Scheduler) -> bool:
        """Whether drafts that are all right would make more tokens per second; else nothing is even looked up."""
        num_decoding = scheduler.num_decoding
        num_drafts = min(_max_drafts(scheduler), num_decoding * self._max_draft_tokens)
        return best_num_drafts(scheduler.rate.rows, num_decoding, [1.0] * num_drafts) > 0

    def _choose(self, guessing: Many[_Guessing], scheduler: Scheduler) -> list[int]:
        """How many drafts of each sequence are taken."""
        chances = [
            (chance, idx)
            for idx, each in enumerate(guessing)
            for chance in each.acceptance.chances(each.draft.num_matching, len(each.draft.token_ids))
        ]
        likeliest = sorted(chances, reverse=True)[: _max_drafts(scheduler)]
        num_taken = best_num_drafts(scheduler.rate.rows, scheduler.num_decoding, [chance for chance, _ in likeliest])
        counts = [0] * len(guessing)
        for _, idx in likeliest[:num_taken]:
            counts[idx] += 1
        return counts

    def _guessing_of(self, sequence: Sequence) -> _Guessing:
        guessing = self._guessing.get(sequence.sequence_id)
        if guessing is None:
            drafter = LookupDrafter(sequence.token_ids, self._answers.of(sequence.work))
            guessing = _Guessing(sequence, drafter, Acceptance(self._acceptance))
            self._guessing[sequence.sequence_id] = guessing
        return guessing


def best_num_drafts(rows: RowTimes, num_decoding: int, chances: Many[float]) -> int:
    """How many drafts, in the order given, make the most tokens per second. `chances`: that each is accepted."""
    best, num_tokens = 0, float(num_decoding)
    time_s = rows.time_s(num_decoding)
    best_rate = _LEAST_GAIN * num_tokens / time_s if time_s else 0.0
    for num_drafts, chance in enumerate(chances, 1):
        num_tokens += chance
        time_s = rows.time_s(num_decoding + num_drafts)
        if time_s and num_tokens > best_rate * time_s:
            best, best_rate = num_drafts, num_tokens / time_s
    return best


def _max_drafts(scheduler: Scheduler) -> int:
    """What the step has room for, and what is not much larger than any step that was measured."""
    num_decoding = scheduler.num_decoding
    probed = max(_PROBE_ROWS, int(_PROBE_SHARE * num_decoding))
    return min(scheduler.num_left, max(scheduler.rate.rows.max_rows - num_decoding, 0) + probed)


def _has_output(sequence: Sequence) -> bool:
    """It has drawn here before: what it draws now is of one choice, and no first token. Beams draw nothing."""
    return not sequence.work.sampling.num_beams and len(sequence.token_ids) > len(sequence.work.token_ids)


def _fitting(draft: Many[int], sequence: Sequence) -> Many[int]:
    """What of a draft can be accepted and gone on from: it ends before the choice does."""
    work = sequence.work
    num_output_tokens = len(sequence.token_ids) - work.num_prompt_tokens
    num_left = max(0, work.sampling.max_tokens - num_output_tokens - 1)
    stops = work.sampling.stop_token_ids
    num_before_stop = next((idx for idx, token_id in enumerate(draft) if token_id in stops), len(draft))
    return draft[: min(num_left, num_before_stop)]
