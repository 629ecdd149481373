"""Who runs a plan: `Executor`, before one `Runner` per rank, and the events in which it answers. Pure: no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.engine.contract.plan import StepPlan, StepResult
from common.values.ranks import WHOLE, Rank

# Called in the compute thread after the KV of layers [0, num_layers) is written for every token of the step.
LayerHook = Callable[[int], None]


class Runner(Protocol):
    """One rank of a model on one device, with its paged KV cache. Not thread-safe: one step at a time."""

    @property
    def rank(self) -> Rank: ...

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        """Execute one step. Raises on a device or shape error; a bad row is reported in its SequenceResult."""
        ...


@dataclass(frozen=True, slots=True)
class LayerComputed:
    """The running step has written the KV of layers [0, num_layers) for all its tokens, as far as it is of `rank`."""

    step_id: int
    num_layers: int
    rank: Rank = WHOLE


@dataclass(frozen=True, slots=True)
class StepFinished:
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole forward pass raised; nothing of it counts. `is_final`: none after it would fare better."""

    step_id: int
    reason: str
    is_final: bool = False


ExecutorEvent = LayerComputed | StepFinished | StepFailed


class Executor(Protocol):
    """Runs steps away from the event loop and answers in events, in order, from a thread of its own.

    A step ends in exactly one StepFinished or StepFailed.
    """

    @property
    def world_size(self) -> int:
        """In how many processes the model runs."""
        ...

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 between steps. A wedged device shows here."""
        ...

    def submit(self, plan: StepPlan, *, reports_layers: bool = False) -> None:
        """Run `plan`; at most one step is in flight. After `close` nothing happens."""
        ...

    def close(self) -> None:
        """End after the running step. Returns at once."""
        ...

    def join(self, limit_s: float) -> bool:
        """After `close`: True when no step runs any more, False when one still does after `limit_s`."""
        ...
