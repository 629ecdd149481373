"""A worker's core with steps driven by hand. Checks every invariant after every event. What both roles' tests need."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from common.engine.contract.executor import StepFailed
from common.engine.contract.plan import StepPlan
from common.values.errors import InvalidTransition
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
        self.pool = core.blocks.groups[0].pool
        self.runner = self._new_runner()
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
        stats = self.core.blocks.stats()
        return stats.used, stats.held

    def _new_runner(self) -> FakeRunner:
        return FakeRunner(self.pool.block_size, [group.window for group in self.core.blocks.groups])

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


def finish(bench: CoreBench) -> None:
    """Of a table test: the running step ends."""
    if bench.plan is None:
        raise InvalidTransition("the harness has no step to finish")
    bench.step()


def fail(bench: CoreBench) -> None:
    """Of a table test: the running step fails; one that is not running, if there is none."""
    step_id = -1 if bench.plan is None else bench.plan.step_id
    bench.plan = None
    bench.handle(StepFailed(step_id, "x"))


def table_rows(table: str) -> list[tuple[str, str, str]]:
    """(event, state, outcome) of each cell: a line of states, then a line per event with its outcomes."""
    lines = table.strip("\n").splitlines()
    names = lines[0].split()
    cells = [(line[:24].strip(), line[24:].split()) for line in lines[1:]]
    return [(event, *cell) for event, outcomes in cells for cell in zip(names, outcomes, strict=True)]


def phases_of(bench: CoreBench, name: str) -> str:
    """The phases of the attempt's requests, ended ones first; "-" without any."""
    requests = reversed(bench.core.role.state.requests.all)
    return "+".join(str(request.phase) for request in requests if request.attempt_id == attempt(name)) or "-"


def is_at_rest(bench: CoreBench) -> bool:
    """No block is referenced, and nothing is waited for but the end of a drain."""
    drain_s = bench.core.role.state.draining.next_s()
    return bench.counts() == (0, 0) and bench.core.next_deadline_s() in (None, drain_s)


def draw_action(rng: random.Random, weighted: Sequence[tuple[int, Callable[[], object]]]) -> None:
    """Do one of them, by weight."""
    weights, actions = zip(*weighted, strict=True)
    rng.choices(actions, weights)[0]()


def attempt(name: str, number: int = 0) -> AttemptId:
    return AttemptId(RequestId(name), number)


def tokens(num: int, first: int = 0) -> tuple[int, ...]:
    return tuple(first + i for i in range(num))
