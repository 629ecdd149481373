"""The compute thread: runs one step at a time, away from the event loop."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.engine.plan import StepPlan, StepResult
from common.engine.runner_protocol import LayerHook, Runner
from common.telemetry.logs import get_logger

OnFinished = Callable[[StepResult], None]
OnFailed = Callable[[int, str], None]


class ComputeThread:
    """Owns the runner. Callbacks run in the compute thread; exactly one of them per step."""

    def __init__(self, runner: Runner, on_finished: OnFinished, on_failed: OnFailed) -> None:
        self._runner = runner
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._started_s: float | None = None

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 between steps. A wedged device shows here."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def submit(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> None:
        """Run `plan`; the core has at most one step in flight, so this never queues."""
        self._started_s = time.monotonic()
        self._executor.submit(self._run, plan, layer_hook)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, plan: StepPlan, layer_hook: LayerHook | None) -> None:
        try:
            result = self._runner.run(plan, layer_hook)
        except Exception as error:  # the edge of the device: any failure of a step becomes an event
            # The type alone: a message of torch's may hold tensor contents.
            get_logger().error("step_failed", step_id=plan.step_id, error=type(error).__name__)
            self._started_s = None
            self._on_failed(plan.step_id, type(error).__name__)
        else:
            self._started_s = None
            self._on_finished(result)
