"""Which failures of steps end a worker: those of a broken device and those that do not stop, not one without memory."""

import queue

import pytest
import torch

from common.engine.contract.executor import ExecutorEvent, StepFailed, StepFinished
from common.engine.contract.plan import StepPlan
from common.engine.executor.failures import MAX_IN_A_ROW, Failures, shown
from common.engine.executor.local import LocalExecutor
from tests.common.engine.executor.test_local import FakeRunner

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (torch.AcceleratorError(ILLEGAL), True),
        (RuntimeError("CUDA driver error: device lost"), True),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (KeyError(7), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_device_is_final_and_others_are_not(error: Exception, is_final: bool) -> None:
    assert Failures().note(error) == is_final


def test_failures_in_a_row_are_final_and_a_step_that_ends_well_forgets_them() -> None:
    failures = Failures()
    assert [failures.note(KeyError(0)) for _ in range(MAX_IN_A_ROW)] == [False] * (MAX_IN_A_ROW - 1) + [True]
    failures.forget()
    assert not failures.note(KeyError(0))


def test_steps_without_memory_end_no_worker_however_many() -> None:
    failures = Failures()
    no_memory = torch.OutOfMemoryError("CUDA out of memory")
    assert not any(failures.note(no_memory) for _ in range(2 * MAX_IN_A_ROW))
    assert not failures.note(KeyError(0))


def test_the_log_names_what_is_broken_in_a_device_and_nothing_of_a_request() -> None:
    said = "CUDA error: an illegal memory access was encountered"
    assert shown(torch.AcceleratorError(ILLEGAL)) == f"AcceleratorError: {said}"
    assert shown(RuntimeError("prompt text")) == "RuntimeError"


def test_the_executor_says_which_failure_was_the_last() -> None:
    events: queue.Queue[ExecutorEvent] = queue.Queue()
    runner = FakeRunner(RuntimeError("once"))
    executor = LocalExecutor(runner, events.put)

    def outcome(step_id: int) -> ExecutorEvent:
        executor.submit(StepPlan(step_id, ()))
        return events.get(timeout=60)

    assert outcome(1) == StepFailed(1, "RuntimeError")
    runner.error = None
    assert isinstance(outcome(2), StepFinished)
    runner.error = torch.AcceleratorError(ILLEGAL)
    assert outcome(3) == StepFailed(3, "AcceleratorError", is_final=True)
    executor.close()
