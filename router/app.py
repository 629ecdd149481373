"""The router as a whole: its service and both APIs, from start to drain. Everything runs in one event loop.

Owns the order of things: the ports are taken first, so that a second start fails at once; on a stop new requests are
refused, running ones get the grace, then the servers close, then the service.
"""

import asyncio
import gc
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop

from common.checkpoint import open_checkpoint
from common.cluster.adapters import AdapterStore
from common.cluster.pools import PoolStore
from common.cluster.prefix_index.mirror import PrefixIndexMirror
from common.cluster.redis_check import say_redis
from common.cluster.registry import RedisRegistry
from common.cluster.reports import LoadingWorker, loading_reports, parsed, router_reports
from common.telemetry.logs import get_logger
from common.telemetry.metrics import Metrics
from common.values.addresses import join_address
from common.values.config import RouterConfig
from common.values.messages import Role
from router.front.frontend import Frontend
from router.front.grpc.server import GrpcServer
from router.front.http.admin import AdminHooks, PoolStatus, ScalePools
from router.front.http.connections import Connections
from router.front.http.generation import HttpSettings
from router.front.http.listening import HttpServer
from router.front.http.server import build_app
from router.front.ports import bind
from router.front.service_protocol import JsonObject
from router.front.tls import grpc_credentials, http_context
from router.request.adapters import ServedAdapters
from router.request.dialect import Dialect
from router.request.served_model import ServedModel
from router.request.validation import Validator
from router.router_registry import RouterRegistry, own_report
from router.service import RouterService
from router.shared_adapters import SharedAdapters
from router.tenants.key_watch import keys_in_force
from router.text.tokenizer import PromptTokenizer

# New objects, less those gone again, between two looks for garbage: a look at so many takes about a millisecond.
GC_THRESHOLD = 10_000
# After the drain no request is left; this is for probes and watches.
_SERVER_GRACE_S = 0.5
# Streams that were ended by the drain still have to write their last event.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where the router listens, once it does."""

    http: int
    grpc: int


OnReady = Callable[[RouterPorts], None]
OnEnd = Callable[[JsonObject], None]


def run(
    config: RouterConfig,
    *,
    scale_pools: ScalePools | None = None,
    pool_status: PoolStatus | None = None,
    on_ready: OnReady | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, on uvloop, in a process of its own. Blocks. Raises PortInUse."""
    # One prompt is encoded at a time: the library's own threads would only add a hand-over.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def settled(ports: RouterPorts) -> None:
        # What is here now stays: looking through it for garbage stops the loop for 55 ms (Zen 4, 2026-11).
        gc.collect()
        gc.freeze()
        # Requests leave next to nothing to collect; every 700 objects, as Python does, it took 4 % of the time.
        gc.set_threshold(GC_THRESHOLD)
        if on_ready is not None:
            on_ready(ports)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, scale_pools=scale_pools, pool_status=pool_status, on_ready=settled))


async def serve(
    config: RouterConfig,
    *,
    scale_pools: ScalePools | None = None,
    pool_status: PoolStatus | None = None,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve both APIs until `stop` is set; without one, until SIGTERM or SIGINT. Then drain.

    `scale_pools(sizes)` is what `POST /admin/v1/pools` calls, `pool_status()` what `/admin/v1/state`
    shows of the pools. `on_ready` is called once both ports answer; whether a request would find workers is what
    `/ready` says. Raises PortInUse, or what broke the service.
    """
    async with AsyncExitStack() as stack:
        stop = stop or stack.enter_context(_StopSignals()).stop
        listener = bind(config.host, config.http_port, "--http-port")
        stack.callback(listener.close)
        await say_redis(config.redis_url, config.namespace)
        model, tokenizer, adapters = _open_model(config)
        metrics = _metrics(config, model)
        on_end = await stack.enter_async_context(_traces(config, model, metrics))
        index = await stack.enter_async_context(_index(config, metrics))
        service = await stack.enter_async_context(_service(config, index, metrics, on_end))
        access = await stack.enter_async_context(keys_in_force(config, metrics))
        encode = partial(tokenizer.encode, add_special_tokens=False)
        validator = Validator(
            model, config.default_deadline_s, random.Random(), encode, config.default_max_tokens, adapters
        )
        frontend = Frontend(service, tokenizer, model, validator, metrics)
        credentials = grpc_credentials(config.cert_file, config.key_file)
        grpc_address = join_address(config.host, config.grpc_port)
        max_body_bytes = config.max_body_bytes or model.max_body_bytes
        grpc_server = GrpcServer(frontend, max_body_bytes, grpc_address, access, credentials, config.max_connections)
        await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, _SERVER_GRACE_S)
        ports = RouterPorts(listener.getsockname()[1], grpc_server.port)
        roll = await stack.enter_async_context(_registered(config, frontend, ports))
        shared = await stack.enter_async_context(_shared_adapters(config, adapters))
        hooks = AdminHooks(
            metrics.exposition,
            _version(),
            scale_pools,
            pool_status,
            roll.routers,
            roll.loading,
            config.router_id,
            index.stats,
            shared.load,
            shared.unload,
        )
        settings = HttpSettings(max_body_bytes, config.sse_keep_alive_s, config.allowed_origins)
        tls = http_context(config.cert_file, config.key_file)
        room = Connections(config.max_connections, metrics)
        http_server = HttpServer(build_app(frontend, settings, hooks, access), listener, tls, room)
        get_logger().info("router_started", http_port=ports.http, grpc_port=ports.grpc, model=model.name)
        if on_ready is not None:
            on_ready(ports)
        await serve_until(stop, service.wait(), frontend, http_server, config.drain_grace_s)
        get_logger().info("router_stopped")


async def serve_until(
    stop: asyncio.Event,
    service_end: Coroutine[Any, Any, None],
    frontend: Frontend,
    http_server: HttpServer,
    grace_s: float,
) -> None:
    """Run the HTTP server until `stop` is set, then drain; or until the service ends, which raises why."""
    serving = asyncio.ensure_future(http_server.serve())
    stopped = asyncio.ensure_future(stop.wait())
    broken = asyncio.ensure_future(service_end)
    try:
        await asyncio.wait({serving, stopped, broken}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            broken.result()
        frontend.in_flight.close()
        await frontend.in_flight.drain(grace_s)
        await frontend.in_flight.wait_until_empty(_LAST_WORDS_S)
    finally:
        http_server.stop()
        stopped.cancel()
        broken.cancel()
        await asyncio.gather(serving, stopped, broken, return_exceptions=True)


class _StopSignals:
    """SIGTERM and SIGINT set an event while this is open."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def __enter__(self) -> "_StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


@asynccontextmanager
async def _traces(config: RouterConfig, model: ServedModel, metrics: Metrics) -> AsyncIterator[OnEnd | None]:
    """Sends traces while it is open, where a collector is configured."""
    if not config.otlp_traces_endpoint:
        yield None
        return
    # Here, as nothing else needs the SDK.
    from router.observe.otlp import TraceExporter
    from router.observe.spans import Origin

    exporter = TraceExporter(config.otlp_traces_endpoint, Origin(config.router_id, model.name, _version()), metrics)
    try:
        yield exporter.add
    finally:
        await exporter.close()


@asynccontextmanager
async def _index(config: RouterConfig, metrics: Metrics) -> AsyncIterator[PrefixIndexMirror]:
    for op in ("copy", "mirror"):
        metrics.inc("pdserve_index_errors", 0, op=op)
    index = PrefixIndexMirror(
        config.redis_url, config.namespace, on_error=lambda op: metrics.inc("pdserve_index_errors", op=op)
    )
    index.start()
    try:
        yield index
    finally:
        await index.close()


@asynccontextmanager
async def _service(
    config: RouterConfig, index: PrefixIndexMirror, metrics: Metrics, on_end: OnEnd | None
) -> AsyncIterator[RouterService]:
    registry = RedisRegistry(config.redis_url, config.namespace)
    loading = loading_reports(config.redis_url, config.namespace)
    pools = PoolStore(config.redis_url, config.namespace)

    async def expected() -> frozenset[Role]:
        """Of a pool that shall not be empty, or whose worker says that it loads."""
        sizes = await pools.get_desired() or {}
        workers = parsed(LoadingWorker, await loading.live() or {})
        return frozenset(role for role in Role if sizes.get(role) or any(worker.role == role for worker in workers))

    service = RouterService(config, index, registry, metrics, on_end=on_end, expected=expected)
    try:
        await service.start()
        yield service
    finally:
        await service.close()
        await registry.close()
        await loading.aclose()
        await pools.close()


@asynccontextmanager
async def _registered(config: RouterConfig, frontend: Frontend, ports: RouterPorts) -> AsyncIterator[RouterRegistry]:
    """Announced among the cluster's routers while it is open."""
    has_tls = bool(config.cert_file)
    me = own_report(config.router_id, config.host, ports.http, ports.grpc, config.redis_url, has_tls=has_tls)
    reports = router_reports(config.redis_url, config.namespace)
    loading = loading_reports(config.redis_url, config.namespace)

    def load() -> tuple[bool, int, int]:
        state = frontend.service.state()
        return frontend.readiness().is_ready, state.num_running, state.num_queued

    roll = RouterRegistry(reports, loading, me, load)
    following = asyncio.create_task(roll.run(), name="routers")
    try:
        yield roll
    finally:
        roll.stop()
        await asyncio.gather(following, return_exceptions=True)
        await reports.aclose()
        await loading.aclose()


@asynccontextmanager
async def _shared_adapters(config: RouterConfig, adapters: ServedAdapters) -> AsyncIterator[SharedAdapters]:
    """Follows what the cluster's routers are told while it is open."""
    store = AdapterStore(config.redis_url, config.namespace)
    shared = SharedAdapters(store, adapters)
    following = asyncio.create_task(shared.run(), name="adapters")
    try:
        yield shared
    finally:
        shared.stop()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


def _open_model(config: RouterConfig) -> tuple[ServedModel, PromptTokenizer, ServedAdapters]:
    checkpoint = open_checkpoint(Path(config.model.path))
    dialect = Dialect.of(checkpoint.chat_template, config.tool_parser, config.reasoning_parser)
    model = ServedModel.of(checkpoint, config.model, int(time.time()), dialect)
    adapters = ServedAdapters.of(config.lora, checkpoint.config, model.name)
    return model, PromptTokenizer.of(checkpoint), adapters


def _metrics(config: RouterConfig, model: ServedModel) -> Metrics:
    metrics = Metrics(model.name, "router", config.router_id)
    metrics.set("pdserve_build_info", 1, version=_version())
    if config.metrics_port is not None:
        metrics.serve(config.host, config.metrics_port)
    return metrics


def _version() -> str:
    try:
        return metadata.version("pdserve")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0.0.0"
