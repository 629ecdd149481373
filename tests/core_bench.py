"""A worker's core with steps driven by hand. Checks every invariant after every event. What both roles' tests need."""

from collections.abc import Sequence
from typing import Any

from common.engine.contract.plan import StepPlan
from common.values.ids import AttemptId, RequestId, RouterId
from common.values.messages import Cancel
from common.worker.core import WorkerCore
from common.worker.events import MessageReceived, RunStep, SendToRouter
from tests.simkit.fake_engine import FakeRunner

ROUTER = RouterId("router")


class CoreBench:
    """Drives one core. `now_s` is the clock; `sent` is all that routers were sent; `plan` the running step."""

    def __init__(self, core: WorkerCore[Any]) -> None:
        self.core = core
        self.now_s = 100.0
        self.pool = core.pool
        self.runner = FakeRunner(core.pool.block_size)
        self.plan: StepPlan | None = None
        self.effects: list[Any] = []
        self.sent: list[Any] = []

    def handle(self, event: Any) -> list[Any]:
        return self._perform(self.core.handle(event, self.now_s))

    def advance(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self._perform(self.core.handle_deadline(self.now_s))

    def cancel(self, name: str, choices: tuple[int, ...] = ()) -> list[Any]:
        return self.handle(MessageReceived(ROUTER, Cancel(attempt(name), choices)))

    def step(self, seconds: float = 0.01) -> list[Any]:
        """Run the running step, and finish it."""
        raise NotImplementedError

    def run_all(self) -> None:
        while self.plan is not None:
            self.step()

    def scheduled(self) -> dict[int, int]:
        """{sequence id: tokens} of the running step."""
        return {} if self.plan is None else {s.sequence_id: len(s.token_ids) for s in self.plan.sequences}

    def counts(self) -> tuple[int, int]:
        stats = self.pool.stats()
        return stats.used, stats.held

    def _take_plan(self, seconds: float) -> StepPlan:
        """The running step, which ends now."""
        assert self.plan is not None, "no step is running"
        plan, self.plan = self.plan, None
        self.now_s += seconds
        return plan

    def _perform(self, effects: Sequence[Any]) -> list[Any]:
        self.core.check_invariants()
        for effect in effects:
            if isinstance(effect, RunStep):
                assert self.plan is None, "two steps at once"
                self.plan = effect.plan
            elif isinstance(effect, SendToRouter):
                self.sent.append(effect.message)
        self.effects += effects
        return list(effects)


def attempt(name: str, number: int = 0) -> AttemptId:
    return AttemptId(RequestId(name), number)


def tokens(num: int, first: int = 0) -> tuple[int, ...]:
    return tuple(first + i for i in range(num))
