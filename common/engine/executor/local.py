"""`Executor` of width 1: the runner in a thread of this process."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from common.engine.contract.executor import ExecutorEvent, LayerComputed, Runner, StepFailed, StepFinished
from common.engine.contract.plan import StepPlan
from common.engine.executor.failures import Failures, shown
from common.engine.executor.processors import pin_this_thread
from common.telemetry.logs import get_logger


class LocalExecutor:
    """Owns the runner. `on_event` is called in the compute thread.

    A daemon thread: a step that never ends does not keep the process from ending.
    """

    def __init__(
        self, runner: Runner, on_event: Callable[[ExecutorEvent], None], cpus: frozenset[int] = frozenset()
    ) -> None:
        self.world_size = runner.rank.world_size
        self._runner = runner
        self._on_event = on_event
        self._cpus = cpus
        self._steps: SimpleQueue[tuple[StepPlan, bool] | None] = SimpleQueue()
        self._failures = Failures()
        self._is_closed = False
        self._started_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._thread.start()

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 between steps. A wedged device shows here."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def submit(self, plan: StepPlan, *, reports_layers: bool = False) -> None:
        """Run `plan`; the core has at most one step in flight, so this never queues.

        Nothing happens after `close`: a core that does not know of the end yet may plan one step more.
        """
        if self._is_closed:
            return
        self._started_s = time.monotonic()
        self._steps.put((plan, reports_layers))

    def close(self) -> None:
        """End after the running step. Returns at once."""
        if not self._is_closed:
            self._is_closed = True
            self._steps.put(None)

    def join(self, limit_s: float) -> bool:
        """After `close`: True when no step runs any more, False when one still does after `limit_s`."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        _show_name("compute")
        pin_this_thread(self._cpus)
        while (step := self._steps.get()) is not None:
            event = self._run(*step)
            self._started_s = None
            self._on_event(event)

    def _run(self, plan: StepPlan, reports_layers: bool) -> StepFinished | StepFailed:
        def report(num_layers: int) -> None:
            self._on_event(LayerComputed(plan.step_id, num_layers, self._runner.rank))

        try:
            result = self._runner.run(plan, report if reports_layers else None)
        except Exception as error:  # the edge of the device: any failure of a step becomes an event
            is_final = self._failures.note(error)
            get_logger().error("step_failed", step_id=plan.step_id, error=shown(error), is_final=is_final)
            return StepFailed(plan.step_id, type(error).__name__, is_final)
        self._failures.forget()
        return StepFinished(result)


def _show_name(name: str) -> None:
    """Tells this thread from the others in `top -H`; Linux alone has such a file."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
