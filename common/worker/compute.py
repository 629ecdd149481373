"""The compute thread: runs one step at a time, away from the event loop."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from common.engine.contract.plan import StepPlan, StepResult
from common.engine.contract.runner import LayerHook, Runner
from common.telemetry.logs import get_logger
from common.worker.processors import pin_this_thread

OnFinished = Callable[[StepResult], None]
OnFailed = Callable[[int, str], None]


class ComputeThread:
    """Owns the runner. Callbacks run in the compute thread; exactly one of them per step.

    A daemon thread: a step that never ends does not keep the process from ending.
    """

    def __init__(
        self, runner: Runner, on_finished: OnFinished, on_failed: OnFailed, cpus: frozenset[int] = frozenset()
    ) -> None:
        self._runner = runner
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._cpus = cpus
        self._steps: SimpleQueue[tuple[StepPlan, LayerHook | None] | None] = SimpleQueue()
        self._is_closed = False
        self._started_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._thread.start()

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 between steps. A wedged device shows here."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def submit(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> None:
        """Run `plan`; the core has at most one step in flight, so this never queues.

        Nothing happens after `close`: a core that has not heard of the end plans one step more, and nobody waits.
        """
        if self._is_closed:
            return
        self._started_s = time.monotonic()
        self._steps.put((plan, layer_hook))

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
            self._run(*step)

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


def _show_name(name: str) -> None:
    """Tells this thread from the others in `top -H`; Linux alone has such a file."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
