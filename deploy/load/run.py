"""Sends a plan on time, whatever the answers do. Owns the tasks of one run."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.load.openai_client import Target, ask, body_of
from deploy.load.plan import PlannedRequest
from deploy.load.prompts import Prompts
from deploy.load.results import Outcome

# From the start to the first arrival.
_LEAD_S = 0.05
_REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    num_planned: int
    num_sent: int
    num_done: int
    num_failed: int
    elapsed_s: float


class Run:
    """One run. At most `max_concurrency` requests are open; one that has to wait for that is late, and counted so."""

    def __init__(self, target: Target, prompts: Prompts, max_concurrency: int) -> None:
        self.started_s = 0.0
        self.outcomes: list[Outcome] = []
        self._target = target
        self._prompts = prompts
        self._places = asyncio.Semaphore(max_concurrency)
        self._num_done = 0

    async def send(self, plan: Sequence[PlannedRequest], report: Callable[[Progress], None]) -> None:
        """Return when every request has ended. Bodies are made before: making one must not delay another."""
        bodies = [body_of(self._target, request, self._prompts) for request in plan]
        self.started_s = time.perf_counter() + _LEAD_S
        reporter = asyncio.create_task(self._report(len(plan), report))
        try:
            async with asyncio.TaskGroup() as tasks:
                for request, body in zip(plan, bodies, strict=True):
                    outcome = Outcome(self.started_s + request.at_s)
                    await asyncio.sleep(outcome.planned_s - time.perf_counter())
                    self.outcomes.append(outcome)
                    tasks.create_task(self._one(body, outcome))
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
            report(self.progress(len(plan)))

    def progress(self, num_planned: int) -> Progress:
        failed = sum(not outcome.is_success for outcome in self.outcomes)
        return Progress(num_planned, len(self.outcomes), self._num_done, failed, time.perf_counter() - self.started_s)

    async def _one(self, body: bytes, outcome: Outcome) -> None:
        async with self._places:
            await ask(self._target, body, outcome)
        self._num_done += 1

    async def _report(self, num_planned: int, report: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            report(self.progress(num_planned))
