"""What a worker outlives on a device: a step without memory, and what it does not: an error that stays."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from common.engine.contract.executor import ExecutorEvent, LayerHook, StepFailed, StepFinished
from common.engine.contract.plan import StepPlan, StepResult
from common.engine.executor.local import LocalExecutor
from common.values.ranks import WHOLE

LIMIT_S = 60.0
# Number, what it takes in bytes, and how it ends.
STEPS = ((1, 1 << 20, StepFinished), (2, 1 << 50, StepFailed), (3, 1 << 20, StepFinished))


class Filling:
    """A runner whose step needs a quarter of the device's memory, beside other work that is small."""

    rank = WHOLE

    def __init__(self, device: str) -> None:
        self._device = device
        self.num_bytes = 1 << 20

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        if self._device == "cpu" and self.num_bytes > 1 << 20:  # a machine's memory is not filled for a rehearsal
            raise torch.OutOfMemoryError("rehearsed")
        torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device).zero_()
        return StepResult(plan.step_id, (), 0.0)


class Asserting:
    """A runner that reads beyond a tensor on the device, then does what would be fine."""

    rank = WHOLE

    def __init__(self, device: str) -> None:
        self._device = device

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        if self._device == "cpu":
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        if plan.step_id == 1:
            beyond = torch.tensor([7], device=self._device)
            print(torch.zeros(2, device=self._device)[beyond].cpu())
        torch.zeros(2, device=self._device).cpu()
        return StepResult(plan.step_id, (), 0.0)


@contextmanager
def executor_of(runner: Filling | Asserting) -> Iterator[tuple[LocalExecutor, "SimpleQueue[ExecutorEvent]"]]:
    events: SimpleQueue[ExecutorEvent] = SimpleQueue()
    executor = LocalExecutor(runner, events.put)
    yield executor, events
    executor.close()


def outlive_a_step_without_memory(device: str = "cuda") -> None:
    """The step fails alone; the next one is computed."""
    runner = Filling(device)
    with executor_of(runner) as (executor, events):
        for step_id, num_bytes, outcome in STEPS:
            runner.num_bytes = num_bytes
            executor.submit(StepPlan(step_id, ()))
            event = events.get(timeout=LIMIT_S)
            assert isinstance(event, outcome), event
            assert not (isinstance(event, StepFailed) and event.is_final), event


def end_by_an_error_that_stays(device: str = "cuda") -> None:
    """In a process of its own, whose device is of no use afterwards."""
    program = f"from tests.gpu.device_faults import broken; broken({device!r})"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-1000:]


def broken(device: str) -> None:
    """The child: the first failure must be said to be final."""
    with executor_of(Asserting(device)) as (executor, events):
        executor.submit(StepPlan(1, ()))
        event = events.get(timeout=LIMIT_S)
        assert isinstance(event, StepFailed), event
        assert event.is_final, event
