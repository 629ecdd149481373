"""The executor of width 1: one event ends each step, whatever the runner does."""

import queue
import subprocess
import sys
import threading

import pytest

from common.engine.contract.executor import (
    Executor,
    ExecutorEvent,
    LayerComputed,
    LayerHook,
    StepFailed,
    StepFinished,
)
from common.engine.contract.plan import StepPlan, StepResult
from common.engine.executor.local import LocalExecutor
from common.values.ranks import Rank


class FakeRunner:
    rank = Rank(0, 1)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end = threading.Event()
        self.may_end.set()
        self.thread_ids: list[int] = []

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        self.thread_ids.append(threading.get_ident())
        self.may_end.wait(60)
        for num_layers in (1, 2) if layer_hook is not None else ():
            layer_hook(num_layers)
        if self.error is not None:
            raise self.error
        return StepResult(plan.step_id, (), 0.0)


class Outcomes:
    def __init__(self) -> None:
        self.queue: queue.Queue[ExecutorEvent] = queue.Queue()

    def executor(self, runner: FakeRunner) -> Executor:
        return LocalExecutor(runner, self.queue.put)


def finished(step_id: int) -> StepFinished:
    return StepFinished(StepResult(step_id, (), 0.0))


def test_a_step_runs_in_a_thread_of_its_own_and_its_layers_are_reported_before_its_end_when_asked_for() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    compute = outcomes.executor(runner)
    compute.submit(StepPlan(6, ()))
    compute.submit(StepPlan(7, ()), reports_layers=True)
    events = [outcomes.queue.get(timeout=60) for _ in range(4)]
    assert events == [finished(6), LayerComputed(7, 1), LayerComputed(7, 2), finished(7)]
    assert threading.get_ident() not in runner.thread_ids
    compute.close()


def test_events_carry_the_runners_rank() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    runner.rank = Rank(1, 3)
    compute = outcomes.executor(runner)
    assert compute.world_size == 3
    compute.submit(StepPlan(7, ()), reports_layers=True)
    assert outcomes.queue.get(timeout=60) == LayerComputed(7, 1, Rank(1, 3))
    compute.close()


@pytest.mark.parametrize("numbers", [(-1, 1), (1, 1), (0, 0)])
def test_there_is_no_rank_outside_its_world(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        Rank(*numbers)


def test_an_exception_becomes_a_failure_that_names_only_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = Outcomes()
    compute = outcomes.executor(FakeRunner(RuntimeError("CANARY prompt text")))
    compute.submit(StepPlan(8, ()))
    assert outcomes.queue.get(timeout=60) == StepFailed(8, "RuntimeError")
    captured = capsys.readouterr()
    assert "CANARY" not in captured.out + captured.err
    compute.close()


def test_the_thread_survives_a_failed_step() -> None:
    runner, outcomes = FakeRunner(RuntimeError()), Outcomes()
    compute = outcomes.executor(runner)
    compute.submit(StepPlan(1, ()))
    outcomes.queue.get(timeout=60)
    runner.error = None
    compute.submit(StepPlan(2, ()))
    assert outcomes.queue.get(timeout=60) == finished(2)
    compute.close()


def test_a_running_step_has_an_age_and_an_idle_thread_has_none() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    runner.may_end.clear()
    compute = outcomes.executor(runner)
    assert compute.step_age_s == 0.0
    compute.submit(StepPlan(3, ()))
    assert compute.step_age_s > 0.0
    runner.may_end.set()
    outcomes.queue.get(timeout=60)
    assert compute.step_age_s == 0.0
    compute.close()


def test_a_step_after_the_end_is_not_run() -> None:
    outcomes = Outcomes()
    compute = outcomes.executor(FakeRunner())
    compute.close()
    compute.submit(StepPlan(4, ()))
    assert compute.join(60)
    assert compute.step_age_s == 0.0
    assert outcomes.queue.empty()


def test_closing_waits_for_no_step_and_says_whether_one_still_runs() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    runner.may_end.clear()
    compute = outcomes.executor(runner)
    compute.submit(StepPlan(5, ()))
    compute.close()
    assert not compute.join(0.01)
    runner.may_end.set()
    assert compute.join(60)
    assert outcomes.queue.get(timeout=60) == finished(5)


def test_a_wedged_step_does_not_keep_the_process_from_ending() -> None:
    """The step never ends, and the process ends all the same: its exit code is its own."""
    program = """
import sys, threading
from common.engine.contract.plan import StepPlan
from common.engine.executor.local import LocalExecutor
from common.values.ranks import WHOLE
class Wedged:
    rank = WHOLE
    def run(self, plan, layer_hook=None):
        running.set()
        threading.Event().wait()
running = threading.Event()
compute = LocalExecutor(Wedged(), print)
compute.submit(StepPlan(1, ()))
running.wait()
compute.close()
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 7


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no names elsewhere")
def test_the_thread_can_be_told_from_the_others_by_its_name() -> None:
    runner = FakeRunner()
    done: queue.Queue[str] = queue.Queue()

    def note(event: ExecutorEvent) -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            done.put(file.read().strip())

    compute = LocalExecutor(runner, note)
    compute.submit(StepPlan(1, ()))
    assert done.get(timeout=60) == "compute"
    compute.close()
