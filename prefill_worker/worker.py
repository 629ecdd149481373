"""The prefill worker's shell: performs what the core decides. No decisions here."""

import asyncio
import time
from collections.abc import Sequence
from typing import assert_never

from common.config import WorkerConfig
from common.core_loop import CoreLoop
from common.engine.plan import StepResult
from common.ids import BlockHash, RouterId
from common.messages import Cancel, Drain, Prefill, Reserve, WorkerStats
from common.worker.compute import ComputeThread
from common.worker.lifecycle import Surroundings, WorkerControl, run_worker, with_health
from kvtransfer.events import ConnectPeer, DropPeer, SendCancel, SendChunk, SendFinished
from kvtransfer.plan import ChunkPlanner
from kvtransfer.sender import SenderCore
from kvtransfer.sender_session import SenderSessions
from kvtransfer.session import SessionSettings
from prefill_worker.core import PrefillCore, PrefillLimits
from prefill_worker.events import (
    Drained,
    DrainRequested,
    LayerComputed,
    MessageReceived,
    PrefillEffect,
    PrefillEvent,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)


async def serve(config: WorkerConfig, control: WorkerControl) -> None:
    """Run a prefill worker until it is drained or stopped."""
    await run_worker(config, control, PrefillWorker)


class PrefillWorker:
    """Joins the core to the compute thread, the routers' streams, the sender sessions and the prefix index."""

    def __init__(self, around: Surroundings) -> None:
        self.drained = asyncio.Event()
        self._around = around
        self._pool = around.new_pool()
        limits, num_layers = PrefillLimits.of(around.config), around.loaded.cache.shape.num_layers
        self._core = PrefillCore(self._pool, _sender_core(around), limits, around.hash_fields, num_layers)
        self._loop: CoreLoop[PrefillEvent, PrefillEffect] = CoreLoop(self._core, self._perform)
        self._sessions = SenderSessions(_session_settings(around), self._loop.post)
        self._compute = ComputeThread(around.loaded.runner, self._on_step_finished, self._on_step_failed)

    @property
    def failed(self) -> asyncio.Future[None]:
        return self._loop.failed

    def on_message(self, router_id: RouterId, message: Reserve | Prefill | Cancel | Drain) -> None:
        if isinstance(message, Drain):
            self.drain(message.grace_s)
        elif isinstance(message, Prefill | Cancel):
            self._loop.post(MessageReceived(router_id, message))

    def on_router_lost(self, router_id: RouterId) -> None:
        self._loop.post(RouterLost(router_id))

    def drain(self, grace_s: float) -> None:
        self._loop.post(DrainRequested(grace_s))

    def stats(self) -> WorkerStats:
        return with_health(self._core.stats(time.monotonic()), self._compute.step_age_s, self._around.config)

    def cached_hashes(self) -> Sequence[BlockHash]:
        return self._pool.cached_hashes()

    async def close(self) -> None:
        self._loop.close()
        await self._sessions.close()
        self._compute.close()

    def _perform(self, effect: PrefillEffect) -> None:
        match effect:
            case RunStep():
                self._run_step(effect)
            case SendToRouter():
                self._around.streams.send(effect.router_id, effect.message)
            case PublishBlocks():
                self._around.index.publish(effect.stored, effect.evicted)
            case Drained():
                self.drained.set()
            case ConnectPeer() | SendChunk() | SendFinished() | SendCancel() | DropPeer():
                self._sessions.perform(effect)
            case _:
                assert_never(effect)

    def _run_step(self, effect: RunStep) -> None:
        step_id = effect.plan.step_id

        def report_layer(num_layers: int) -> None:
            self._loop.post_threadsafe(LayerComputed(step_id, num_layers))

        self._compute.submit(effect.plan, report_layer if effect.reports_layers else None)
        self._around.metrics.observe("pdserve_step_tokens", effect.plan.num_tokens)

    def _on_step_finished(self, result: StepResult) -> None:
        self._around.metrics.observe("pdserve_step_seconds", result.duration_s)
        self._loop.post_threadsafe(StepFinished(result))

    def _on_step_failed(self, step_id: int, reason: str) -> None:
        self._loop.post_threadsafe(StepFailed(step_id, reason))


def _sender_core(around: Surroundings) -> SenderCore:
    config, shape = around.config, around.loaded.cache.shape
    planner = ChunkPlanner(shape.num_layers, shape.bytes_per_token // shape.num_layers, config.min_chunk_bytes)
    return SenderCore(planner, config.max_inflight_bytes, config.link_timeout_s)


def _session_settings(around: Surroundings) -> SessionSettings:
    config, loaded = around.config, around.loaded
    return SessionSettings(
        ref=around.ref,
        pairing=loaded.pairing,
        kv=loaded.cache.data,
        host=config.host,
        transport=config.transport,
        digest=config.digest,
        max_inflight_bytes=config.max_inflight_bytes,
        link_timeout_s=config.link_timeout_s,
    )
