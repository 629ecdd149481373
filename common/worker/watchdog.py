"""When a life of a worker is over although it was not asked to end: it stood still, or a step does not end.

A worker that stood still longer than its lease has been given up by everybody: its requests run elsewhere. It must not
go on as if nothing had been, so it begins anew, as another incarnation. A step that does not end takes the process
with it: nothing else frees the blocks and the device that it holds.
"""

import asyncio
import time
from collections.abc import Callable

from common.values.errors import PdserveError
from common.values.messages import WorkerState
from common.worker.reporting import STATS_INTERVAL_S

# Longer than the lease: a busy machine may keep a process waiting, and a new life costs all that runs here.
LEASES = 2.0


class StepWedged(PdserveError):
    """A step runs longer than `max_step_s`: the process ends and is replaced."""


class Watchdog:
    """Pure. `beat` is called by a loop that never waits long by itself."""

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._limit_s = LEASES * lease_s
        self._last_s = now_s

    def beat(self, now_s: float) -> float:
        """For how long this process stood still, when that was too long; else 0."""
        still_s, self._last_s = now_s - self._last_s, now_s
        return still_s if still_s > self._limit_s else 0.0


async def until_over(
    lease_s: float, state: Callable[[], WorkerState], clock: Callable[[], float] = time.monotonic
) -> float:
    """Returns for how long the process stood still once that was too long. Raises StepWedged."""
    watchdog = Watchdog(lease_s, clock())
    while True:
        await asyncio.sleep(STATS_INTERVAL_S)
        if still_s := watchdog.beat(clock()):
            return still_s
        if state() is WorkerState.UNHEALTHY:
            raise StepWedged("a step does not end")
