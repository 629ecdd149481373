"""The shell of one role: joins its core to the executor, the routers' streams, the sessions and the index.

Performs what the core decides and feeds back what came of it; no decisions here. A role supplies its core and its
handoff sessions, the rest is the same for both.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from common.cores.core_loop import CoreLoop
from common.engine.contract.executor import Executor, ExecutorEvent, StepFailed, StepFinished
from common.engine.contract.plan import StepPlan
from common.engine.executor.local import LocalExecutor
from common.engine.executor.processors import processors
from common.values.errors import PdserveError
from common.values.ids import BlockHash, RouterId
from common.values.messages import Cancel, Drain, Prefill, Reserve, WorkerInfo, WorkerStats
from common.worker.adapters import AdapterDoor
from common.worker.audit import Audit, audit
from common.worker.core import WorkerCore
from common.worker.events import (
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
)
from common.worker.lifecycle import WorkerContext
from common.worker.reporting import record_drafts, record_message, with_health


class StepsFail(PdserveError):
    """No step ends well any more: the process ends and is replaced."""


class Sessions(Protocol):
    """What the shell needs of a role's handoff sessions: they perform the network effects of its core."""

    def perform(self, effect: Any) -> None: ...

    async def close(self) -> None: ...

    @property
    def is_quiet(self) -> bool:
        """After `close`: no block is read or written any more."""
        ...


class RoleShell:
    """One role at work. Create it in the event loop's thread, and call it there."""

    def __init__(
        self,
        context: WorkerContext,
        core: WorkerCore[Any],
        open_sessions: Callable[[Callable[[Any], None]], Sessions],
    ) -> None:
        self.drained = asyncio.Event()
        self._context = context
        self._core = core
        self._plan = StepPlan(0, ())  # the one that runs
        self._loop: CoreLoop[Any, Any] = CoreLoop(core, self._perform)
        self._adapters = AdapterDoor(
            context.loaded.adapters,
            context.config.max_loras if context.config.tensor_parallel_size == 1 else 0,
            lambda: core.adapters_in_use,
            lambda router_id, message: self._loop.post(MessageReceived(router_id, message)),
            lambda router_id, refused: context.streams.send(router_id, refused),
            context.metrics,
        )
        self._sessions = open_sessions(self._loop.post)
        cpus = processors(context.config.cpus)
        self._executor: Executor = LocalExecutor(context.loaded.runner, self._on_executor_event, cpus)

    @property
    def failed(self) -> asyncio.Future[None]:
        return self._loop.failed

    def fail(self, error: BaseException) -> None:
        self._loop.fail(error)

    def on_message(self, router_id: RouterId, message: Reserve | Prefill | Cancel | Drain) -> None:
        if isinstance(message, Drain):
            self.drain(message.grace_s)
        else:
            self._adapters.on_message(router_id, message)

    def on_router_lost(self, router_id: RouterId) -> None:
        self._adapters.on_router_lost(router_id)
        self._loop.post(RouterLost(router_id))

    def drain(self, grace_s: float) -> None:
        self._loop.post(DrainRequested(grace_s))

    def stats(self) -> WorkerStats:
        stats = with_health(self._core.stats(time.monotonic()), self._executor.step_age_s, self._context.config)
        return replace(stats, ranks_silent_s=self._context.loaded.ranks_silent_s)

    def audit(self, info: WorkerInfo) -> Audit:
        return audit(info, self._core, time.monotonic(), self._context.loaded.runner.rank)

    def cached_hashes(self) -> Sequence[BlockHash]:
        return self._core.blocks.cached_hashes()

    async def close(self) -> None:
        self._adapters.close()
        self._loop.close()
        await self._sessions.close()
        self._executor.close()

    async def is_quiet(self, limit_s: float) -> bool:
        return await asyncio.to_thread(self._executor.join, limit_s) and self._sessions.is_quiet

    def _perform(self, effect: Any) -> None:
        match effect:
            case RunStep():
                self._run_step(effect)
            case SendToRouter(router_id, message):
                record_message(self._context.metrics, message, self._context.config.min_link_bytes_per_s)
                self._context.streams.send(router_id, message)
            case PublishBlocks(stored, evicted):
                self._context.index.publish(stored, evicted)
            case Drained():
                self.drained.set()
            case _:
                self._sessions.perform(effect)

    def _run_step(self, effect: RunStep) -> None:
        self._plan = effect.plan
        self._executor.submit(effect.plan, reports_layers=effect.reports_layers)
        self._context.metrics.observe("pdserve_step_tokens", effect.plan.num_tokens)

    def _on_executor_event(self, event: ExecutorEvent) -> None:
        if isinstance(event, StepFinished):
            self._context.metrics.observe("pdserve_step_seconds", event.result.duration_s)
            record_drafts(self._context.metrics, self._plan, event.result)
        self._loop.post_threadsafe(event)
        if isinstance(event, StepFailed) and event.is_final:
            self._loop.fail_threadsafe(StepsFail(f"steps fail: {event.reason}"))
