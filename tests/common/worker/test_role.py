"""The shell of a role at its end."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.contract.plan import StepPlan, StepResult
from common.values.config import ModelConfig, WorkerConfig
from common.values.ids import RouterId
from common.values.ranks import WHOLE
from common.worker.events import RunStep
from common.worker.role import RoleShell, StepsFail


class EagerCore:
    """Plans a step at every event, whatever has ended around it."""

    def __init__(self) -> None:
        self.num_events = 0

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        self.num_events += 1
        return [RunStep(StepPlan(self.num_events, ()))]

    def next_deadline_s(self) -> float | None:
        return None


class Runner:
    rank = WHOLE

    def __init__(self) -> None:
        self.step_ids: list[int] = []

    def run(self, plan: StepPlan, layer_hook: object = None) -> StepResult:
        self.step_ids.append(plan.step_id)
        return StepResult(plan.step_id, (), 0.0)


class NoSessions:
    is_quiet = True

    async def close(self) -> None: ...


def new_shell(runner: Runner, core: EagerCore) -> RoleShell:
    metrics = SimpleNamespace(observe=lambda *_: None)
    loaded = SimpleNamespace(runner=runner, adapters=None)
    config = WorkerConfig(role="prefill", worker_id="prefill-0", model=ModelConfig(path="none"))
    around: Any = SimpleNamespace(loaded=loaded, config=config, metrics=metrics)
    return RoleShell(around, core, lambda post: NoSessions())  # type: ignore[arg-type]


class BrokenRunner(Runner):
    def run(self, plan: StepPlan, layer_hook: object = None) -> StepResult:
        super().run(plan)
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


async def test_a_device_that_is_broken_ends_the_worker_at_its_first_step() -> None:
    """It would answer every further request at once, with a failure."""
    runner = BrokenRunner()
    shell = new_shell(runner, EagerCore())
    shell.on_router_lost(RouterId("r0"))  # has the core plan a step
    with pytest.raises(StepsFail, match="steps fail: RuntimeError"):
        await asyncio.wait_for(asyncio.shield(shell.failed), 60)
    await shell.close()
    assert await shell.is_quiet(60)


async def test_a_step_that_is_planned_after_the_end_is_dropped_without_a_failure() -> None:
    """As after a freeze: the old life is closed, and what was on its way to it still comes."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    runner, core = Runner(), EagerCore()
    shell = new_shell(runner, core)
    await shell.close()
    shell.on_router_lost(RouterId("r0"))
    assert await shell.is_quiet(60)
    assert core.num_events == 1
    assert runner.step_ids == []
    assert not shell.failed.done()
    assert faults == []
