"""From loading to the last release: what a worker process does around its role.

Order at start: load, listen, self-test by being asked (the router's hello), then the lease; so nobody routes to
a worker that is not ready. Order at the end: drain, lease given back, streams closed, server stopped.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from common.config import WorkerConfig
from common.engine.loading import LoadedModel, load_model
from common.grpc_options import server_options
from common.ids import BlockHash, RouterId, WorkerRef
from common.kv.block_pool import BlockPool
from common.messages import Cancel, Drain, Prefill, Reserve, Role, WorkerInfo, WorkerState, WorkerStats
from common.pb import worker_pb2_grpc
from common.prefix_index.protocol import PrefixIndexWriter, Registration
from common.prefix_index.redis import WorkerPresence
from common.telemetry.logs import get_logger
from common.telemetry.metrics import Metrics
from common.worker.audit import Audit
from common.worker.router_streams import RouterStreams

STATS_INTERVAL_S = 0.25
# Generated code has no types.
_add_to_server: Any = worker_pb2_grpc.add_WorkerServiceServicer_to_server
SERVER_STOP_GRACE_S = 1.0


class WorkerControl:
    """Requests to a running worker, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ready: Callable[[dict[str, Any]], None]) -> None:
        self._loop = loop
        self._on_ready = on_ready
        self.drain_requested: asyncio.Future[float] = loop.create_future()
        self.stopped = asyncio.Event()

    def request_drain(self, grace_s: float) -> None:
        """Ignored once the worker has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_drain, grace_s)

    def request_stop(self) -> None:
        """Ignored once the worker has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stopped.set)

    def report_ready(self, description: dict[str, Any]) -> None:
        self._on_ready(description)

    def handle_signals(self, grace_s: float) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, grace_s)

    def _on_signal(self, grace_s: float) -> None:
        if self.drain_requested.done():
            self.stopped.set()
        self._set_drain(grace_s)

    def _set_drain(self, grace_s: float) -> None:
        if not self.drain_requested.done():
            self.drain_requested.set_result(grace_s)


class RoleWorker(Protocol):
    """What a role offers to the shell around it. All calls in the event loop's thread."""

    drained: asyncio.Event

    @property
    def failed(self) -> asyncio.Future[None]:
        """Raises the bug that makes the role's state worthless: the process ends and is replaced."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the worker as after a bug of its core."""
        ...

    def on_message(self, router_id: RouterId, message: Reserve | Prefill | Cancel | Drain) -> None: ...

    def on_router_lost(self, router_id: RouterId) -> None: ...

    def drain(self, grace_s: float) -> None: ...

    def stats(self) -> WorkerStats: ...

    def audit(self, info: WorkerInfo) -> Audit: ...

    def cached_hashes(self) -> Sequence[BlockHash]: ...

    async def close(self) -> None: ...


class Surroundings:
    """What the shell hands to a role when it builds it."""

    def __init__(self, config: WorkerConfig, loaded: LoadedModel, server: grpc.aio.Server, metrics: Metrics) -> None:
        self.config = config
        self.loaded = loaded
        self.server = server
        self.metrics = metrics
        self.ref = WorkerRef(config.worker_id, secrets.token_hex(8))
        self.streams: RouterStreams  # set before the first message can arrive
        self.index: PrefixIndexWriter

    @property
    def hash_fields(self) -> dict[str, str]:
        """What block hashes cover besides tokens: all that two workers must have in common."""
        return dict(self.loaded.pairing.fields)

    def new_pool(self) -> BlockPool:
        return BlockPool(self.loaded.cache.num_blocks, self.config.block_size)


Build = Callable[[Surroundings], RoleWorker]


async def run_worker(config: WorkerConfig, control: WorkerControl, build: Build) -> None:
    """Serve one role until it is drained or stopped."""
    log = get_logger()
    log.info("worker_loading", worker_id=config.worker_id, role=config.role)
    loaded = await asyncio.to_thread(load_model, config)
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port(f"{config.host}:{config.port}")
    address = f"{config.host}:{port}"
    metrics = Metrics(loaded.served_name, config.role, config.worker_id)
    around = Surroundings(config, loaded, server, metrics)
    info = _describe(around, address)
    role_box: list[RoleWorker] = []
    around.streams = RouterStreams(
        info,
        lambda router_id, message: role_box[0].on_message(router_id, message),
        lambda router_id: role_box[0].on_router_lost(router_id),
        lambda: role_box[0].audit(info),
    )
    presence = WorkerPresence(
        config.redis_url,
        config.namespace,
        Registration(around.ref, info.role, address),
        lease_s=config.lease_s,
        snapshot=lambda: list(role_box[0].cached_hashes()),
    )
    around.index = presence
    role = build(around)
    role_box.append(role)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _on_loop_exception(role, loop, context))
    _add_to_server(around.streams, server)
    await server.start()
    metrics_port = metrics.serve(config.host, config.metrics_port)
    await presence.start()
    control.report_ready(
        {**around.ref._asdict(), "role": config.role, "address": address, "metrics_port": metrics_port, "pid": info.pid}
    )
    log.info("worker_ready", worker_id=config.worker_id, role=config.role, address=address, num_blocks=info.num_blocks)
    try:
        await _serve_until_end(control, role, around)
    finally:
        await presence.close()
        around.streams.close()
        await role.close()
        await server.stop(SERVER_STOP_GRACE_S)
        log.info("worker_ended", worker_id=config.worker_id)


def _on_loop_exception(role: RoleWorker, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A job of ours that failed in its thread (a chunk not written, say) leaves an effect without its event."""
    loop.default_exception_handler(context)
    if "work_thread" in context:
        role.fail(context["exception"])


def _describe(around: Surroundings, address: str) -> WorkerInfo:
    config, loaded = around.config, around.loaded
    return WorkerInfo(
        ref=around.ref,
        role=Role(config.role),
        model_name=loaded.served_name,
        block_size=config.block_size,
        num_blocks=loaded.cache.num_blocks,
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        pid=os.getpid(),
        pairing=loaded.pairing,
        handoff_address=address if config.role == "decode" else "",
        device=loaded.device,
    )


async def _serve_until_end(control: WorkerControl, role: RoleWorker, around: Surroundings) -> None:
    async with asyncio.TaskGroup() as tasks:
        stats = tasks.create_task(_report_stats(role, around))
        drain = tasks.create_task(_drain_when_asked(control, role))
        ended = [asyncio.ensure_future(control.stopped.wait()), asyncio.ensure_future(role.drained.wait())]
        causes: set[asyncio.Future[Any]] = {*ended, role.failed}
        try:
            await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
            if role.failed.done():
                role.failed.result()
        finally:
            for task in (stats, drain, *ended):
                task.cancel()


async def _drain_when_asked(control: WorkerControl, role: RoleWorker) -> None:
    role.drain(await control.drain_requested)


async def _report_stats(role: RoleWorker, around: Surroundings) -> None:
    """Tell routers and Prometheus how the worker is, often enough that silence means trouble."""
    while True:
        stats = role.stats()
        around.streams.broadcast(stats)
        record_stats(around.metrics, stats)
        await asyncio.sleep(STATS_INTERVAL_S)


def record_stats(metrics: Metrics, stats: WorkerStats) -> None:
    """The gauges of one worker."""
    blocks = {
        "used": stats.kv_blocks_used,
        "cached": stats.kv_blocks_cached,
        "free": stats.kv_blocks_free,
        "held": stats.kv_blocks_held,
    }
    total = sum(blocks.values())
    for state, count in blocks.items():
        metrics.set("pdserve_kv_blocks", count, state=state)
    metrics.set("pdserve_kv_blocks_total", total)
    metrics.set("pdserve_kv_cache_usage_ratio", (blocks["used"] + blocks["held"]) / max(1, total))
    metrics.set("pdserve_requests_running", stats.num_running)
    metrics.set("pdserve_requests_waiting", stats.num_waiting)
    metrics.set("pdserve_waiting_uncached_tokens", stats.num_waiting_uncached_tokens)


def with_health(stats: WorkerStats, step_age_s: float, config: WorkerConfig) -> WorkerStats:
    """A step older than `max_step_s` makes the worker unhealthy, whatever its threads still answer."""
    return replace(stats, state=WorkerState.UNHEALTHY) if step_age_s > config.max_step_s else stats
