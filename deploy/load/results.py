"""What was measured, and what it amounts to. Pure: no IO, no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request. Times of one clock; `planned_s` is when it should have been sent, and latencies count from there."""

    planned_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.planned_s

    @property
    def latency_s(self) -> float:
        return self.event_s[-1] - self.planned_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None when there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between two events of the stream."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a good request keeps to, in seconds; None = anything."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        pairs = (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s or 0.0),
            (self.latency_s, outcome.latency_s),
        )
        return all(bound is None or value <= bound for bound, value in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a latency, in milliseconds."""

    mean: float
    median: float
    p99: float
    std: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0)
        mean = math.fsum(seconds) / len(seconds)
        variance = math.fsum((value - mean) ** 2 for value in seconds) / len(seconds)
        ordered = sorted(seconds)
        values = (mean, percentile(ordered, 50), percentile(ordered, 99), math.sqrt(variance))
        return cls(*(value * 1000 for value in values))


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a whole run. `num_good` is None without a goal; `send_delay`: how late we ourselves were."""

    duration_s: float
    num_completed: int
    num_failed: int
    num_good: int | None
    total_input_tokens: int
    total_output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    latency: Spread
    send_delay: Spread

    @property
    def request_throughput(self) -> float:
        return self._per_second(self.num_completed)

    @property
    def request_goodput(self) -> float | None:
        return None if self.num_good is None else self._per_second(self.num_good)

    @property
    def output_throughput(self) -> float:
        return self._per_second(self.total_output_tokens)

    @property
    def total_token_throughput(self) -> float:
        return self._per_second(self.total_input_tokens + self.total_output_tokens)

    def _per_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def summarize(outcomes: Sequence[Outcome], started_s: float, goal: Goal | None) -> Summary:
    """Everything the report says. The duration is from the start to the last end."""
    good = [outcome for outcome in outcomes if outcome.is_success]
    tpots = (outcome.tpot_s for outcome in good)
    return Summary(
        duration_s=max((outcome.ended_s for outcome in outcomes), default=started_s) - started_s,
        num_completed=len(good),
        num_failed=len(outcomes) - len(good),
        num_good=None if goal is None else sum(goal.is_met(outcome) for outcome in good),
        total_input_tokens=sum(outcome.num_input_tokens for outcome in good),
        total_output_tokens=sum(outcome.num_output_tokens for outcome in good),
        ttft=Spread.of([outcome.ttft_s for outcome in good]),
        tpot=Spread.of([tpot for tpot in tpots if tpot is not None]),
        itl=Spread.of([gap for outcome in good for gap in outcome.itl_s]),
        latency=Spread.of([outcome.latency_s for outcome in good]),
        send_delay=Spread.of([max(0.0, outcome.sent_s - outcome.planned_s) for outcome in outcomes]),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between neighbours, as NumPy has it."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
