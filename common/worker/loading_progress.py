"""Tells how far a worker is with loading: in its log, and in Redis for routers, the page and its starter.

The registry does not know the worker before it is ready, so this is where it is seen until then.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from common.cluster.leased_reports import LeasedReports
from common.cluster.redis import wait_for_event
from common.cluster.reports import LoadingWorker, loading_reports
from common.engine.contract.progress import LoadPhase, Progress
from common.telemetry.logs import get_logger
from common.values.config import WorkerConfig

INTERVAL_S = 0.25
_LOGGED_SHARE = 0.25


class LoadingProgress:
    """`note` from any thread; `report` is what was noted last."""

    def __init__(self, worker_id: str, role: str) -> None:
        self._worker_id, self._role = worker_id, role
        self._started_s = time.monotonic()
        self._now: tuple[str, float] = ("starting", 0.0)  # replaced as a whole
        self._logged: tuple[str, float] = ("", 0.0)

    def note(self, phase: LoadPhase, share: float) -> None:
        """Logged when the phase changes, and at every quarter of one."""
        self._now = (phase.value, share)
        if phase.value != self._logged[0] or share >= self._logged[1] + _LOGGED_SHARE:
            self._logged = self._now
            get_logger().info(
                "worker_loading_phase",
                worker_id=self._worker_id,
                role=self._role,
                phase=phase.value,
                share=round(share, 2),
            )

    def report(self) -> LoadingWorker:
        phase, share = self._now
        elapsed_s = time.monotonic() - self._started_s
        return LoadingWorker(self._worker_id, self._role, phase, round(share, 3), round(elapsed_s, 1))


@asynccontextmanager
async def shown_loading(config: WorkerConfig) -> AsyncIterator[Progress]:
    """While it is open, the progress that is noted is reported; afterwards the worker is not loading any more."""
    progress = LoadingProgress(config.worker_id, config.role)
    if not config.redis_url:  # no place to report to
        yield progress.note
        return
    reports = loading_reports(config.redis_url, config.namespace)
    is_done = asyncio.Event()
    telling = asyncio.create_task(_tell(reports, progress, config.worker_id, is_done))
    try:
        yield progress.note
    finally:
        is_done.set()
        await asyncio.gather(telling, return_exceptions=True)
        await reports.withdraw(config.worker_id)
        await reports.aclose()


async def _tell(reports: LeasedReports, progress: LoadingProgress, worker_id: str, is_done: asyncio.Event) -> None:
    """Until it is done; what is being sent then is sent."""
    while not is_done.is_set():
        await reports.announce(worker_id, asdict(progress.report()))
        await wait_for_event(is_done, INTERVAL_S)
