"""Reports how far the workers of a cluster are with loading. Reads Redis; no decisions here."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import NoReturn

from common.cluster.reports import LoadingWorker, loading_reports, parsed
from common.values.config import ClusterConfig
from deploy.client.show import loading_text

INTERVAL_S = 0.5
_SHARE_STEP = 0.25

Report = Callable[[str, str], None]


class LoadingWatch:
    """One line per worker and phase, and per quarter of a phase."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said: dict[str, tuple[str, float]] = {}

    def show(self, loading: Sequence[LoadingWorker]) -> None:
        """Say what is new; workers that are not loading any more are forgotten."""
        names = {worker.worker_id for worker in loading}
        self._said = {worker_id: said for worker_id, said in self._said.items() if worker_id in names}
        for worker in loading:
            phase, share = self._said.get(worker.worker_id, ("", 0.0))
            if worker.phase != phase or worker.share >= share + _SHARE_STEP:
                self._said[worker.worker_id] = (worker.phase, worker.share)
                self._report(worker.worker_id, loading_text(asdict(worker)))


async def watch_loading(config: ClusterConfig, report: Report) -> NoReturn:
    """Until cancelled."""
    watch = LoadingWatch(report)
    async with aclosing(loading_reports(config.redis_url, config.namespace)) as reports:
        while True:
            loading = await reports.live()
            if loading is not None:
                watch.show(parsed(LoadingWorker, loading))
            await asyncio.sleep(INTERVAL_S)
