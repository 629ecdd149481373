"""A request's state in the router: choices, attempts and what was measured. Pure: no IO; changed by the core alone.

The states of a request and of an attempt, and what moves them, are in `router/core/transitions.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import AttemptTokens, FirstTokens, HandoffReport
from common.values.request import Fingerprint, FinishReason, PromptLogprobs, TokenEvent, Work
from router.core.events import PrefixKey
from router.core.generation import GenerationRequest
from router.core.policy import RoutingDecision
from router.core.workers import Worker

# Tokens of one choice that may arrive ahead of a missing one; more means that the missing one never comes.
MAX_HELD_TOKENS = 64
# Kept per request for people to read; a request that waits long may be refused very often.
MAX_KEPT_DECISIONS = 16
MAX_KEPT_ATTEMPTS = 16


class RequestState(StrEnum):
    """absent: not here, or not any more. waiting: no decode worker has taken it yet. closing: every token is out."""

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    CLOSING = "closing"


class AttemptPhase(StrEnum):
    """absent, for who speaks of it: it is not there, or not on that worker.

    closing: every token is out, and the prefill worker has not said yet what it did: its message is on the way.
    """

    __hash__ = str.__hash__  # looked up for every message; Enum's own is not C

    ABSENT = "absent"
    LOOKING_UP = "looking_up"
    QUEUED = "queued"
    RESERVING = "reserving"
    GRANTED = "granted"
    PREFILLING = "prefilling"
    LOCAL = "local"
    DECODING = "decoding"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(slots=True)
class Choice:
    """One of a request's n continuations: the tokens delivered so far, in order."""

    idx: int
    token_ids: list[int] = field(default_factory=list)
    held: dict[int, TokenEvent] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    is_stopped: bool = False  # by the front end
    has_diverged: bool = False  # a worker repeated a delivered token as another one

    @property
    def has_ended(self) -> bool:
        return self.is_stopped or self.finish_reason is not None

    @property
    def is_stuck(self) -> bool:
        """What its worker goes on with does not follow from what was delivered: only a replay helps.

        Either so many later tokens have come that the missing one never will, or a repeat was a different token:
        two prefill workers may draw differently where two logits nearly tie.
        """
        return self.has_diverged or len(self.held) > MAX_HELD_TOKENS

    def accept(self, event: TokenEvent) -> list[TokenEvent]:
        """Take a token in; returns what can be delivered now. Repeats vanish, early ones wait."""
        if self.has_ended or self.has_diverged:
            return []
        if event.position < len(self.token_ids):
            self.has_diverged = event.token.token_id != self.token_ids[event.position]
            return []
        self.held[event.position] = event
        ready: list[TokenEvent] = []
        while (head := self.held.pop(len(self.token_ids), None)) is not None:
            self.token_ids.append(head.token.token_id)
            self.finish_reason = head.finish_reason
            ready.append(head)
            if head.finish_reason is not None:
                self.held.clear()  # nothing comes after the end
        return ready


@dataclass(slots=True)
class RouterAttempt:
    """One placement of some of a request's choices. `choices` are those that have not ended."""

    attempt_id: AttemptId
    choices: list[int]
    token_ids: tuple[int, ...]
    phase: AttemptPhase = AttemptPhase.LOOKING_UP
    lookups: set[PrefixKey] = field(default_factory=set)  # not answered yet
    cached_tokens: dict[WorkerRef, int] = field(default_factory=dict)  # what the index promised
    decode: WorkerRef | None = None
    fingerprint: Fingerprint | None = None  # of the decode worker
    prefill: WorkerRef | None = None  # of the current try
    prefill_try: int = -1  # -1: none yet
    prefill_lost_s: float = float("-inf")  # when a try was last given up
    first_missing_token: int = 0
    is_local: bool = False
    end_reason: str = ""
    # What the decode worker said before the prefill worker had told all logprobs of the prompt.
    early: list[HandoffReport | AttemptTokens] = field(default_factory=list)

    def promised(self, worker: WorkerRef) -> int:
        """Tokens that the index believes to be cached on a worker; the last token is always computed."""
        return min(self.cached_tokens.get(worker, 0), len(self.token_ids) - 1)

    def num_missing(self, worker: WorkerRef) -> int:
        """Tokens that a worker would have to compute, as far as the index knows."""
        return len(self.token_ids) - self.promised(worker)

    def num_blocks(self, worker: WorkerRef, block_size: int) -> int:
        """Blocks that the attempt would newly take on a decode worker, as far as the index knows."""
        return len(self.token_ids) // block_size + 1 - self.promised(worker) // block_size

    @property
    def has_lost_a_try(self) -> bool:
        """The try that brings the KV may then be an earlier one than the current."""
        return self.prefill_lost_s > float("-inf")

    def is_on(self, worker: Worker, prefill_try: int | None) -> bool:
        """Whether a worker speaks of it; of its prefill worker's tries only the current one counts."""
        if worker.is_decode:
            return self.decode == worker.ref
        return self.prefill == worker.ref and prefill_try in (None, self.prefill_try)


@dataclass(slots=True)
class Marks:
    """What was measured on the way, for the waterfall. Times on the router's clock.

    All of it belongs to the placement that made the first token; what a replay measures counts as decoding.
    """

    attempt: int = -1
    dispatched_s: float | None = None
    first_token_s: float | None = None
    first_tokens: FirstTokens | None = None
    report: HandoffReport | None = None


@dataclass(slots=True)
class Request:
    """A live request. `attempts` are the live ones by number, `ended_attempts` the others."""

    spec: GenerationRequest
    ordinal: int  # of arrival
    arrived_s: float
    first_attempt: int = 0  # attempts are numbered from here
    choices: list[Choice] = field(default_factory=list)
    attempts: dict[int, RouterAttempt] = field(default_factory=dict)
    ended_attempts: list[RouterAttempt] = field(default_factory=list)
    decisions: list[RoutingDecision] = field(default_factory=list)
    num_attempts: int = 0
    num_retries: int = 0
    num_drafts: int = 0  # guessed and verified by decode workers, repeats after a loss included
    num_accepted_drafts: int = 0
    is_granted: bool = False  # some decode worker has taken it, at some time
    is_accepted: bool = False
    num_scored: int = (
        1  # leading prompt tokens whose logprobs were delivered, where they are wanted; the first has none
    )
    fingerprint: Fingerprint | None = None  # of the workers that made what was delivered: others would go on otherwise
    marks: Marks = field(default_factory=Marks)

    def __post_init__(self) -> None:
        self.choices = self.choices or [Choice(idx) for idx in range(self.spec.num_choices)]

    @property
    def state(self) -> RequestState:
        if all(choice.has_ended for choice in self.choices):
            return RequestState.CLOSING
        return RequestState.RUNNING if self.is_granted else RequestState.WAITING

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def is_scoring(self) -> bool:
        """Logprobs of the prompt are wanted, and not all were delivered: then no token is."""
        return self.spec.num_prompt_logprobs is not None and self.num_scored < len(self.spec.token_ids)

    @property
    def deadline_s(self) -> float:
        return self.arrived_s + self.spec.deadline_s

    @property
    def num_completion_tokens(self) -> int:
        """That the client was given."""
        return sum(len(choice.token_ids) for choice in self.choices) if self.spec.has_output else 0

    @property
    def handoff_report(self) -> HandoffReport | None:
        """What the decode worker said of the KV. An answer that ended with its first tokens needed none, whether it
        came in time to be reported or not."""
        report = self.marks.report
        is_needed = report is not None and (report.is_local or any(len(c.token_ids) > 1 for c in self.choices))
        return report if is_needed else None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that no worker had to compute, as the worker that made the first token reported."""
        report, first = self.handoff_report, self.marks.first_tokens
        if report is not None and report.is_local:
            num_cached = report.num_cached_tokens
        else:
            num_cached = first.num_cached_tokens if first is not None else 0
        return min(num_cached, len(self.spec.token_ids))

    def new_attempts(self, choices: Iterable[int]) -> list[RouterAttempt]:
        """Attempts for choices that none has: one for all while there is no output, else one for each."""
        live = [idx for idx in choices if not self.choices[idx].has_ended]
        for idx in live:
            self.choices[idx].held.clear()
            self.choices[idx].has_diverged = False
        has_output = any(self.choices[idx].token_ids for idx in live)
        groups = [[idx] for idx in live] if has_output else [live]
        return [self._new_attempt(group) for group in groups if group]

    def work(self, attempt: RouterAttempt, now_s: float) -> Work:
        """What a worker needs to know of the attempt."""
        return Work(
            attempt_id=attempt.attempt_id,
            token_ids=attempt.token_ids,
            num_prompt_tokens=len(self.spec.token_ids),
            sampling=self.spec.sampling,
            choices=tuple(attempt.choices),
            priority=self.spec.priority,
            cache_salt=self.spec.cache_salt,
            deadline_s=max(0.0, self.deadline_s - now_s),
            tenant=self.spec.tenant,
            num_prompt_logprobs=self.spec.num_prompt_logprobs if self.is_scoring else None,
            adapter=self.spec.adapter,
        )

    def dispatched(self, attempt: RouterAttempt, now_s: float) -> None:
        """A worker starts on the prompt. Whatever was measured before led to no token."""
        if self.marks.first_token_s is None:
            self.marks = Marks(attempt.attempt_id.attempt, now_s)

    def awaits_account(self, attempt: RouterAttempt) -> bool:
        """Whether the prefill worker has yet to say what the first tokens took. After a loss it may never do so."""
        is_measured = attempt.attempt_id.attempt == self.marks.attempt and not attempt.has_lost_a_try
        return is_measured and self.marks.first_tokens is None

    def note_report(self, report: HandoffReport) -> None:
        if report.attempt_id.attempt == self.marks.attempt and self.marks.report is None:
            self.marks.report = report

    def note_first_tokens(self, message: FirstTokens) -> None:
        if message.attempt_id.attempt == self.marks.attempt and self.marks.first_tokens is None:
            self.marks.first_tokens = message

    def renew(self, attempt: RouterAttempt) -> RouterAttempt:
        """The same choices under a new number, for another placement: late answers to the old one can't match."""
        renewed = self._new_attempt(list(attempt.choices))
        renewed.cached_tokens = attempt.cached_tokens
        return renewed

    def end_attempt(self, attempt: RouterAttempt, reason: str) -> None:
        """Move a live attempt to the ended ones."""
        attempt.phase, attempt.end_reason = AttemptPhase.ENDED, reason
        del self.attempts[attempt.attempt_id.attempt]
        self.ended_attempts.append(attempt)
        del self.ended_attempts[:-MAX_KEPT_ATTEMPTS]

    def take_scores(self, scores: PromptLogprobs) -> PromptLogprobs | None:
        """Those that are new and next, if any: a replay computes all again."""
        if not (self.is_scoring and scores.start <= self.num_scored < scores.end):
            return None
        fresh = scores.after(self.num_scored)
        self.num_scored = scores.end
        return fresh

    def take(self, attempt: RouterAttempt, tokens: Sequence[TokenEvent], now_s: float) -> list[TokenEvent]:
        """Take tokens of an attempt in; returns those that are new and in order. Choices that end leave the attempt."""
        fresh = []
        for token in tokens:
            if token.choice_idx in attempt.choices:
                fresh += self.choices[token.choice_idx].accept(token)
        if fresh:
            self.fingerprint = attempt.fingerprint
            if self.marks.first_token_s is None:
                self.marks.first_token_s = now_s
            self._drop_ended(attempt)
        return fresh

    def is_stuck(self, attempt: RouterAttempt) -> bool:
        return any([self.choices[idx].is_stuck for idx in attempt.choices])

    def stop_choice(self, choice_idx: int) -> RouterAttempt | None:
        """The front end has enough of a choice; the attempt that had it, None when it has ended already."""
        if self.choices[choice_idx].has_ended:
            return None
        attempt = next(attempt for attempt in self.attempts.values() if choice_idx in attempt.choices)
        self.choices[choice_idx].is_stopped = True
        self._drop_ended(attempt)
        return attempt

    def note_drafts(self, message: AttemptTokens) -> None:
        self.num_drafts += message.num_drafts
        self.num_accepted_drafts += message.num_accepted_drafts

    def note_decisions(self, decisions: Iterable[RoutingDecision]) -> None:
        """Keep decisions; of very many only the newest."""
        self.decisions.extend(decisions)
        del self.decisions[:-MAX_KEPT_DECISIONS]

    def check_invariants(self) -> None:
        """Every choice that has not ended is in one attempt; raises AssertionError."""
        live = [choice.idx for choice in self.choices if not choice.has_ended]
        placed = sorted(idx for attempt in self.attempts.values() for idx in attempt.choices)
        assert live == placed, f"{self.request_id}: choices {live} live, {placed} in attempts"
        assert self.attempts, f"{self.request_id} has ended and is still here"

    def _drop_ended(self, attempt: RouterAttempt) -> None:
        if any([self.choices[idx].has_ended for idx in attempt.choices]):
            attempt.choices = [idx for idx in attempt.choices if not self.choices[idx].has_ended]

    def _new_attempt(self, choices: list[int]) -> RouterAttempt:
        delivered = tuple(self.choices[choices[0]].token_ids)
        number = self.first_attempt + self.num_attempts
        attempt = RouterAttempt(AttemptId(self.request_id, number), choices, self.spec.token_ids + delivered)
        self.attempts[number] = attempt
        self.num_attempts += 1
        return attempt


class Placed(NamedTuple):
    """An attempt on the worker that speaks of it; when it is not there (the row "absent") only `worker` counts."""

    request: Request
    attempt: RouterAttempt
    worker: Worker
