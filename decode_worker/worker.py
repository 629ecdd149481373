"""The decode worker's shell: performs what the core decides. No decisions here."""

import asyncio
import time
from collections.abc import Sequence
from typing import assert_never

from common.config import WorkerConfig
from common.core_loop import CoreLoop
from common.engine.plan import StepResult
from common.ids import BlockHash, RouterId
from common.messages import Cancel, Drain, HandoffReport, Prefill, Reserve, WorkerStats
from common.worker.compute import ComputeThread
from common.worker.lifecycle import Surroundings, WorkerControl, run_worker, with_health
from decode_worker.core import DecodeCore, DecodeLimits
from decode_worker.events import (
    DecodeEffect,
    DecodeEvent,
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)
from kvtransfer.events import DiscardChunk, DropPeer, PostReceive, SendAcknowledged, SendCancel, WriteChunk
from kvtransfer.plan import ChunkPlanner
from kvtransfer.receiver import ReceiverCore
from kvtransfer.receiver_session import ReceiverSessions
from kvtransfer.session import SessionSettings


async def serve(config: WorkerConfig, control: WorkerControl) -> None:
    """Run a decode worker until it is drained or stopped."""
    await run_worker(config, control, DecodeWorker)


class DecodeWorker:
    """Joins the core to the compute thread, the routers' streams, the receiver sessions and the prefix index."""

    def __init__(self, around: Surroundings) -> None:
        self.drained = asyncio.Event()
        self._around = around
        self._pool = around.new_pool()
        self._core = DecodeCore(self._pool, _receiver_core(around), DecodeLimits.of(around.config), around.hash_fields)
        self._loop: CoreLoop[DecodeEvent, DecodeEffect] = CoreLoop(self._core, self._perform)
        self._sessions = ReceiverSessions(_session_settings(around), self._loop.post)
        self._sessions.add_to(around.server)
        self._compute = ComputeThread(around.loaded.runner, self._on_step_finished, self._on_step_failed)

    @property
    def failed(self) -> asyncio.Future[None]:
        return self._loop.failed

    def on_message(self, router_id: RouterId, message: Reserve | Prefill | Cancel | Drain) -> None:
        if isinstance(message, Drain):
            self.drain(message.grace_s)
        elif isinstance(message, Reserve | Cancel):
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

    def _perform(self, effect: DecodeEffect) -> None:
        match effect:
            case RunStep():
                self._compute.submit(effect.plan)
                self._around.metrics.observe("pdserve_step_tokens", effect.plan.num_tokens)
            case SendToRouter():
                self._send(effect)
            case PublishBlocks():
                self._around.index.publish(effect.stored, effect.evicted)
            case Drained():
                self.drained.set()
            case PostReceive() | WriteChunk() | DiscardChunk() | SendAcknowledged() | SendCancel() | DropPeer():
                self._sessions.perform(effect)
            case _:
                assert_never(effect)

    def _send(self, effect: SendToRouter) -> None:
        message = effect.message
        if isinstance(message, HandoffReport) and not message.is_local:
            self._around.metrics.observe("pdserve_kv_transfer_seconds", message.transfer_s)
            self._around.metrics.observe("pdserve_kv_transfer_exposed_seconds", message.exposed_s)
            self._around.metrics.observe("pdserve_kv_transfer_bytes", message.num_bytes)
        self._around.streams.send(effect.router_id, message)

    def _on_step_finished(self, result: StepResult) -> None:
        self._around.metrics.observe("pdserve_step_seconds", result.duration_s)
        self._loop.post_threadsafe(StepFinished(result))

    def _on_step_failed(self, step_id: int, reason: str) -> None:
        self._loop.post_threadsafe(StepFailed(step_id, reason))


def _receiver_core(around: Surroundings) -> ReceiverCore:
    config, shape = around.config, around.loaded.cache.shape
    planner = ChunkPlanner(shape.num_layers, shape.bytes_per_token // shape.num_layers, config.min_chunk_bytes)
    return ReceiverCore(planner, config.max_inflight_bytes, config.link_timeout_s)


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
