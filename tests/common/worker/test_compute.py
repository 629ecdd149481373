"""The compute thread: one callback per step, whatever the runner does."""

import queue
import subprocess
import sys
import threading

import pytest

from common.engine.contract.plan import StepPlan, StepResult
from common.engine.contract.runner import LayerHook
from common.worker.compute import ComputeThread


class FakeRunner:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end = threading.Event()
        self.may_end.set()
        self.thread_ids: list[int] = []

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        self.thread_ids.append(threading.get_ident())
        self.may_end.wait(60)
        if layer_hook is not None:
            layer_hook(1)
        if self.error is not None:
            raise self.error
        return StepResult(plan.step_id, (), 0.0)


class Outcomes:
    def __init__(self) -> None:
        self.queue: queue.Queue[object] = queue.Queue()

    def thread(self, runner: FakeRunner) -> ComputeThread:
        return ComputeThread(runner, self.queue.put, lambda step_id, reason: self.queue.put((step_id, reason)))


def test_a_step_runs_in_a_thread_of_its_own_and_reports_layers() -> None:
    runner, outcomes, layers = FakeRunner(), Outcomes(), list[int]()
    compute = outcomes.thread(runner)
    compute.submit(StepPlan(7, ()), layers.append)
    assert outcomes.queue.get(timeout=60) == StepResult(7, (), 0.0)
    assert layers == [1]
    assert threading.get_ident() not in runner.thread_ids
    compute.close()


def test_an_exception_becomes_a_failure_that_names_only_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = Outcomes()
    compute = outcomes.thread(FakeRunner(RuntimeError("CANARY prompt text")))
    compute.submit(StepPlan(8, ()))
    assert outcomes.queue.get(timeout=60) == (8, "RuntimeError")
    captured = capsys.readouterr()
    assert "CANARY" not in captured.out + captured.err
    compute.close()


def test_the_thread_survives_a_failed_step() -> None:
    runner, outcomes = FakeRunner(RuntimeError()), Outcomes()
    compute = outcomes.thread(runner)
    compute.submit(StepPlan(1, ()))
    outcomes.queue.get(timeout=60)
    runner.error = None
    compute.submit(StepPlan(2, ()))
    assert outcomes.queue.get(timeout=60) == StepResult(2, (), 0.0)
    compute.close()


def test_a_running_step_has_an_age_and_an_idle_thread_has_none() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    runner.may_end.clear()
    compute = outcomes.thread(runner)
    assert compute.step_age_s == 0.0
    compute.submit(StepPlan(3, ()))
    assert compute.step_age_s > 0.0
    runner.may_end.set()
    outcomes.queue.get(timeout=60)
    assert compute.step_age_s == 0.0
    compute.close()


def test_a_step_after_the_end_is_not_run() -> None:
    outcomes = Outcomes()
    compute = outcomes.thread(FakeRunner())
    compute.close()
    compute.submit(StepPlan(4, ()))
    assert compute.join(60)
    assert compute.step_age_s == 0.0
    assert outcomes.queue.empty()


def test_closing_waits_for_no_step_and_says_whether_one_still_runs() -> None:
    runner, outcomes = FakeRunner(), Outcomes()
    runner.may_end.clear()
    compute = outcomes.thread(runner)
    compute.submit(StepPlan(5, ()))
    compute.close()
    assert not compute.join(0.01)
    runner.may_end.set()
    assert compute.join(60)
    assert outcomes.queue.get(timeout=60) == StepResult(5, (), 0.0)


def test_a_wedged_step_does_not_keep_the_process_from_ending() -> None:
    """The step never ends, and the process ends all the same: its exit code is its own."""
    program = """
import sys, threading
from common.engine.contract.plan import StepPlan
from common.worker.compute import ComputeThread
class Wedged:
    def run(self, plan, layer_hook=None):
        running.set()
        threading.Event().wait()
running = threading.Event()
compute = ComputeThread(Wedged(), print, print)
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

    def note(result: StepResult) -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            done.put(file.read().strip())

    compute = ComputeThread(runner, note, lambda step_id, reason: None)
    compute.submit(StepPlan(1, ()))
    assert done.get(timeout=60) == "compute"
    compute.close()
