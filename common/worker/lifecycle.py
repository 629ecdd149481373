"""From loading to the last release: what a worker process does around its roles.

    load -> one role after another -> end

The weights are loaded once. One life of a role: listen, build, self-test by being asked (the router's hello), then the
lease, so no request goes to a worker that is not ready; drain, lease given back, streams closed, role closed, server
stopped. Then the process ends, or serves the next role: a new life with an incarnation and a registration of its own
around the same weights. Whatever a failure leaves open is closed, in that order.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import grpc

from common.cluster.presence import WorkerPresence
from common.cluster.protocol import PrefixIndexWriter, Registration
from common.cluster.redis_check import say_redis
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel, load_model, refit
from common.engine.scheduling.block_tables import PoolGroup
from common.telemetry.logs import get_logger
from common.telemetry.metrics import Metrics
from common.tls.admission import interceptors
from common.tls.identity import Identity
from common.values.addresses import join_address
from common.values.config import WorkerConfig
from common.values.ids import BlockHash, RouterId, WorkerRef
from common.values.messages import Cancel, Drain, Prefill, RankProcess, Reserve, Role, WorkerInfo, WorkerStats
from common.wire.grpc_options import peer_server_options
from common.wire.pb import worker_pb2_grpc
from common.wire.undecodable import RefuseUndecodable
from common.worker.audit import Audit
from common.worker.control import RoleChange, RoleChangeFailed, WorkerControl
from common.worker.loading_progress import shown_loading
from common.worker.reporting import report_stats
from common.worker.router_streams import RouterStreams
from common.worker.watchdog import until_over

# Generated code has no types.
_add_to_server: Any = worker_pb2_grpc.add_WorkerServiceServicer_to_server
SERVER_STOP_GRACE_S = 1.0
# What a role that has drained may still be doing with the blocks before its weights are given up with it.
QUIET_LIMIT_S = 5.0


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

    async def is_quiet(self, limit_s: float) -> bool:
        """After `close`: True when nothing of the role touches the model any more, False if so after `limit_s`."""
        ...


class WorkerContext:
    """What the shell hands to a role when it builds it. Create it in the running loop."""

    def __init__(self, config: WorkerConfig, loaded: LoadedModel, metrics: Metrics) -> None:
        self.config = config
        self.loaded = loaded
        self.identity = Identity(config.role, config.namespace, config.tls)
        guards = (*interceptors(self.identity), RefuseUndecodable())
        self.server = grpc.aio.server(interceptors=guards, options=peer_server_options())
        self.metrics = metrics
        self.ref = WorkerRef(config.worker_id, secrets.token_hex(8))
        self.streams: RouterStreams  # set before the first message can arrive
        self.index: PrefixIndexWriter

    @property
    def hash_fields(self) -> dict[str, str]:
        """What block hashes cover besides tokens: all that two workers must have in common."""
        return dict(self.loaded.fingerprint.fields)

    def new_pools(self) -> list[PoolGroup]:
        """Empty ones, for the blocks of each group of the cache."""
        cache, size = self.loaded.cache, self.config.block_size
        pairs = zip(cache.num_blocks, cache.spec.groups, strict=True)
        return [PoolGroup(BlockPool(num_blocks, size), group.window) for num_blocks, group in pairs]


Build = Callable[[WorkerContext], RoleWorker]
# The role's own code, by its name: a worker's shell knows neither.
BuildOf = Callable[[str], Build]


@dataclass(frozen=True, slots=True)
class _Process:
    """What lives as long as the process, whatever its role."""

    control: WorkerControl
    build_of: BuildOf
    metrics_port: int


async def run_worker(config: WorkerConfig, control: WorkerControl, build_of: BuildOf) -> None:
    """Load once, then serve one role after another until drained or stopped."""
    async with AsyncExitStack() as stack:
        stack.callback(control.report_ended)
        get_logger().info("worker_loading", worker_id=config.worker_id, role=config.role)
        if config.redis_url:
            await say_redis(config.redis_url, config.namespace)
        async with shown_loading(config) as progress:
            loaded = await asyncio.to_thread(load_model, config, progress)
        stack.callback(loaded.close)
        metrics = Metrics(loaded.served_name, config.role, config.worker_id)
        metrics.inc("pdserve_model_loads")
        endpoint = metrics.serve(config.host, config.metrics_port)
        stack.callback(endpoint.close)
        process = _Process(control, build_of, endpoint.port)
        await _serve_lives(process, WorkerContext(config, loaded, metrics), control.report_ready)
        while (change := control.next_role()) is not None:
            loaded = refit(loaded, change.config)
            metrics = _change_metrics(metrics, change)

            def report(description: dict[str, Any], change: RoleChange = change, metrics: Metrics = metrics) -> None:
                metrics.observe("pdserve_role_change_seconds", time.monotonic() - change.asked_s)
                control.report_changed(description)

            await _serve_lives(process, WorkerContext(change.config, loaded, metrics), report)


def _change_metrics(metrics: Metrics, change: RoleChange) -> Metrics:
    """Counted where the series exists already: the first value of a new one is no increase to Prometheus."""
    metrics.inc("pdserve_role_changes", to_role=change.config.role)
    return metrics.relabeled(change.config.role, change.config.worker_id)


async def _serve_lives(
    process: _Process, context: WorkerContext, report_ready: Callable[[dict[str, Any]], None]
) -> None:
    """A role to its end. A life that stood still past its lease is followed by another around the same weights."""
    while await _serve_role(process, context, report_ready) is _End.OUTLIVED:
        context = WorkerContext(context.config, refit(context.loaded, context.config), context.metrics)
        report_ready = _ignore


def _ignore(description: dict[str, Any]) -> None:
    """What waited for the role has heard of its first life."""


class _End(Enum):
    ASKED = "asked"  # to drain, to stop, to take another role
    OUTLIVED = "outlived"  # it stood still past its lease


async def _serve_role(
    process: _Process, context: WorkerContext, report_ready: Callable[[dict[str, Any]], None]
) -> _End:
    """One life of a role, to its end. Raises RoleChangeFailed if what follows it could not use the model."""
    config, control = context.config, process.control
    async with AsyncExitStack() as stack:
        stack.callback(get_logger().info, "worker_ended", worker_id=config.worker_id)
        stack.push_async_callback(context.server.stop, SERVER_STOP_GRACE_S)
        port = context.identity.add_port(context.server, join_address(config.host, config.port))
        address = join_address(config.host, port)
        info = _describe(context, address)
        presence, role = _build(process, context, info, address, stack)
        await context.server.start()
        stack.push_async_callback(presence.close)
        await presence.start()
        context.metrics.inc("pdserve_role_changes", 0, to_role=info.role.other)
        context.metrics.inc("pdserve_lives_given_up", 0, reason="frozen")
        report_ready(
            {
                **context.ref._asdict(),
                **{"role": config.role, "address": address, "metrics_port": process.metrics_port, "pid": info.pid},
            }
        )
        get_logger().info(
            "worker_ready", worker_id=config.worker_id, role=config.role, address=address, num_blocks=info.num_blocks
        )
        end = await _serve_until_end(control, role, context)
    is_followed = end is _End.OUTLIVED or control.next_role() is not None
    if is_followed and not await role.is_quiet(QUIET_LIMIT_S):
        raise RoleChangeFailed(f"{config.worker_id} still computes {QUIET_LIMIT_S:g} s after its role was closed")
    return end


def _build(
    process: _Process, context: WorkerContext, info: WorkerInfo, address: str, stack: AsyncExitStack
) -> tuple[WorkerPresence, RoleWorker]:
    """The role and what it talks through; `stack` closes the streams, then the role."""
    config = context.config
    role_box: list[RoleWorker] = []
    context.streams = RouterStreams(
        info,
        lambda router_id, message: role_box[0].on_message(router_id, message),
        lambda router_id: role_box[0].on_router_lost(router_id),
        lambda: role_box[0].audit(info),
    )
    presence = WorkerPresence(
        config.redis_url,
        config.namespace,
        Registration(context.ref, info.role, address),
        lease_s=config.lease_s,
        snapshot=lambda: list(role_box[0].cached_hashes()),
    )
    context.index = presence
    role = process.build_of(config.role)(context)
    role_box.append(role)
    stack.push_async_callback(role.close)
    stack.callback(context.streams.close)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: _on_loop_exception(role, loop, context))
    stack.callback(loop.set_exception_handler, None)
    if (others := context.loaded.others) is not None:
        stack.callback(others.on_lost(lambda error: _fail_in_loop(loop, role, error)))
    _add_to_server(context.streams, context.server)
    return presence, role


def _fail_in_loop(loop: asyncio.AbstractEventLoop, role: RoleWorker, error: BaseException) -> None:
    """From any thread: no step of the role can end any more."""
    with suppress(RuntimeError):  # the loop has ended, and the role with it
        loop.call_soon_threadsafe(role.fail, error)


def _on_loop_exception(role: RoleWorker, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A job of ours that failed in its thread (a chunk not written, say) leaves an effect without its event."""
    loop.default_exception_handler(context)
    if "work_thread" in context:
        role.fail(context["exception"])


def _describe(context: WorkerContext, address: str) -> WorkerInfo:
    config, loaded = context.config, context.loaded
    return WorkerInfo(
        ref=context.ref,
        role=Role(config.role),
        model_name=loaded.served_name,
        block_size=config.block_size,
        num_blocks=loaded.cache.num_blocks[0],
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        pid=os.getpid(),
        fingerprint=loaded.fingerprint,
        handoff_address=address if config.role == "decode" else "",
        device=loaded.device.place.type,
        ranks=tuple(RankProcess(pid, loaded.device.place.type) for pid in loaded.rank_pids),
    )


async def _serve_until_end(control: WorkerControl, role: RoleWorker, context: WorkerContext) -> _End:
    over = asyncio.create_task(until_over(context.config.lease_s, lambda: role.stats().state))
    async with asyncio.TaskGroup() as tasks:
        helpers: list[asyncio.Future[Any]] = [
            tasks.create_task(report_stats(role.stats, context.streams.broadcast, context.metrics)),
            tasks.create_task(_drain_after(control.until_drain_is_asked(), role)),
            tasks.create_task(_drain_after(control.until_change_is_asked(), role)),
        ]
        ended = [asyncio.ensure_future(control.stopped.wait()), asyncio.ensure_future(role.drained.wait())]
        causes: set[asyncio.Future[Any]] = {*ended, role.failed, over}
        try:
            done, _ = await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*helpers, *ended, over):
                task.cancel()
    if role.failed.done():
        role.failed.result()  # not inside the group, which would hide what it was
    is_asked = control.stopped.is_set() or any(future in done for future in ended)  # which wins over a new life
    return _give_up(over, context) if over in done and not is_asked else _End.ASKED


def _give_up(over: "asyncio.Task[float]", context: WorkerContext) -> _End:
    """Raises StepWedged, which ends the process."""
    reason = "frozen" if over.exception() is None else "wedged"
    context.metrics.inc("pdserve_lives_given_up", reason=reason)
    get_logger().error("worker_life_given_up", worker_id=context.config.worker_id, reason=reason)
    over.result()
    return _End.OUTLIVED


async def _drain_after(asked: Awaitable[float], role: RoleWorker) -> None:
    role.drain(await asked)
