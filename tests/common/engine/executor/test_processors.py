"""Pinned compute threads: on the processors that are named, and no other thread of the process with them."""

import os
import queue
import sys

import pytest
from pydantic import ValidationError

from common.engine.contract.executor import ExecutorEvent, LayerHook
from common.engine.contract.plan import StepPlan, StepResult
from common.engine.executor.local import LocalExecutor
from common.engine.executor.processors import processors
from common.values.config import WorkerSettings
from common.values.ranks import WHOLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
NO_SUCH_CPU = 1_000_000


class Looker:
    """Runs no step, but looks where it would."""

    rank = WHOLE

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        self.found = os.sched_getaffinity(0)
        return StepResult(plan.step_id, (), 0.0)


def affinity_of_compute(cpus: frozenset[int]) -> set[int]:
    runner, done = Looker(), queue.Queue[ExecutorEvent]()
    compute = LocalExecutor(runner, done.put, cpus)
    compute.submit(StepPlan(1, ()))
    done.get(timeout=60)
    compute.close()
    return runner.found


def test_ranges_and_single_processors_are_read() -> None:
    assert processors("0-3,8") == {0, 1, 2, 3, 8}
    assert processors("5") == {5}
    assert processors("") == frozenset()


@pytest.mark.parametrize("text", ["0-", "a", "0,,1", "1;2", "-1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings(cpus=text)


def test_compute_thread_stays_on_its_processors_and_the_others_stay_free() -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    assert affinity_of_compute(frozenset({cpu})) == {cpu}
    assert os.sched_getaffinity(0) == before


def test_without_any_the_thread_runs_where_the_process_may() -> None:
    assert affinity_of_compute(frozenset()) == os.sched_getaffinity(0)


def test_processors_that_are_not_ours_are_logged_and_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert affinity_of_compute(frozenset({NO_SUCH_CPU})) == os.sched_getaffinity(0)
    captured = capsys.readouterr()
    assert "not_pinned" in captured.out + captured.err
