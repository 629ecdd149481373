"""The ledger of chaos clients: one entry per request, with the time of every token, and the judgement of its answer."""

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.cluster.load import Case


class Api(StrEnum):
    HTTP_STREAM = "HTTP stream"
    HTTP_WHOLE = "HTTP"
    GRPC_STREAM = "gRPC stream"


class Outcome(StrEnum):
    RIGHT = "right"  # exactly the reference's tokens and text
    WRONG = "wrong"  # a success that differs from it, or tokens before an error that do
    ERROR = "error"  # an explicit error
    CUT = "cut"  # the connection broke
    LEFT = "left"  # the client went, as planned; what it had was right


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and what the reference answers; `others` are right answers, too, if given whole."""

    case: Case
    expected: tuple[int, ...]
    text: str
    others: tuple["Question", ...] = ()


class Left(Exception):
    """The client goes before its answer is complete, as it meant to."""


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client goes: with so many tokens, or after so many seconds if that is earlier."""

    after_tokens: int
    after_s: float | None = None


@dataclass(slots=True)
class Entry:
    """One request as its client saw it. Times are of the monotonic clock."""

    request_id: str
    question: Question
    api: Api
    started_s: float
    cache_salt: str = ""  # of no other request: the prompt has to be computed and shipped
    leave: Leave | None = None
    answer_id: str = ""  # what the router calls it, once known
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    outcome: Outcome | None = None
    answer: Question | None = None  # which of the right ones it is
    detail: str = ""
    ended_s: float = 0.0

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Raises Left when the client has what it wanted, and more is to come."""
        self.tokens += token_ids
        self.text += text
        self.token_times_s += [time.monotonic()] * len(token_ids)
        if self.leave is not None and self.leave.after_tokens <= len(self.tokens) < len(self.question.expected):
            raise Left

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """`outcome` as the transport had it; the content decides whether it is worse."""
        self.ended_s = time.monotonic()
        for answer in (*self.question.others, self.question):
            self.outcome, self.detail = self._judged(answer, outcome, detail)
            if self.outcome is not Outcome.WRONG:
                self.answer = answer
                return

    def _judged(self, answer: Question, outcome: Outcome, detail: str) -> tuple[Outcome, str]:
        expected = answer.expected[: len(self.tokens)]
        if outcome is Outcome.RIGHT:
            expected = answer.expected
            # The bytes of a character that the last token leaves incomplete are not shown.
            if self.text.rstrip("\ufffd") != answer.text.rstrip("\ufffd"):
                outcome, detail = Outcome.WRONG, f"text {self.text!r}, expected {answer.text!r}"
        if tuple(self.tokens) != tuple(expected):
            outcome, detail = Outcome.WRONG, f"{self.tokens}, expected {list(expected)} ({detail})"
        return outcome, detail

    def was_running(self, at_s: float) -> bool:
        return self.started_s <= at_s and (self.outcome is None or self.ended_s > at_s)

    def gap_after(self, at_s: float) -> float | None:
        """From `at_s` to the next token; None when none came."""
        return next((token_s - at_s for token_s in self.token_times_s if token_s > at_s), None)

    def longest_wait_s(self, since_s: float = 0.0) -> float:
        """The longest wait for a token, the first included, that ended after `since_s`; a whole answer is one wait."""
        if self.api is Api.HTTP_WHOLE:
            return self.ended_s - self.started_s if self.ended_s > since_s else 0.0
        pairs = itertools.pairwise([self.started_s, *self.token_times_s])
        return max((later - earlier for earlier, later in pairs if later > since_s), default=0.0)


def count_outcomes(entries: Iterable[Entry]) -> Counter[str]:
    return Counter(str(entry.outcome) for entry in entries)


def problems(entries: Iterable[Entry]) -> list[str]:
    """What is neither right nor planned, one line each."""
    fine = (Outcome.RIGHT, Outcome.LEFT)
    return [f"{e.request_id} {e.api} {e.outcome}: {e.detail[:300]}" for e in entries if e.outcome not in fine]


def in_words(pauses: Sequence[float]) -> str:
    """From a death to the next token of those that had to be placed again."""
    if not pauses:
        return ""
    ordered = sorted(pauses)
    middle, late = statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]
    return (
        f"; from the death to the next token {middle:.2f} s in the median, {late:.2f} s in the 95th percentile, "
        f"{ordered[-1]:.2f} s at most"
    )
