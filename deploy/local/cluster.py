"""A whole cluster on this machine: Redis, Ray, routers, the pools. Starts it, uses it, leaves nothing behind.

    check ports and model -> session (directory, reaper) -> Redis -> routers -> Ray -> pools -> ready -> use it
    -> routers stop taking requests, workers drain -> Ray, routers, Redis end -> what is left of the session ends

Everything is started from the main thread: the kernel ends a child when the thread that made it does.
"""

import asyncio
import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.pools import PoolStore
from common.values.addresses import dialable, join_address
from common.values.config import ClusterConfig
from deploy.client.admin import AdminClient, AdminFailed
from deploy.client.credentials import admin_key_of, with_admin_key
from deploy.client.loading_watch import watch_loading
from deploy.local.redis_server import RedisServer, resolve_redis
from deploy.local.router_process import router_process, router_settings
from deploy.process.child import StartFailed, hide_secrets
from deploy.process.session import session
from deploy.process.stopping import Interrupted, StopRequest, failure_of, first_result, interruptible, stop_request
from deploy.process.supervised import Supervised
from deploy.ray.local import local_ray, log_dir
from deploy.ray.placement import LocalPlacement
from deploy.ray.pools import RayPools
from deploy.scaling.autoscale_loop import AutoscaleLoop
from deploy.scaling.pool_members import PoolStatus

_POLL_INTERVAL_S = 0.2
_MAX_START_CRASHES = 2
_KILL_LIMIT_S = 10.0
# A cluster that has all its workers and is not ready for so long is waiting for something else.
STILL_S = 3.0
_REDIS_PAUSE_S = 5.0

# What is happening, for the terminal: (who, what).
Report = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that is ready, while it lasts. Of several routers, the first is the one to show."""

    config: ClusterConfig

    @property
    def http_urls(self) -> list[str]:
        """Of every router."""
        scheme = "https" if self.config.router.cert_file else "http"
        return [
            f"{scheme}://{join_address(dialable(each.host), each.http_port)}" for each in router_settings(self.config)
        ]

    @property
    def grpc_addresses(self) -> list[str]:
        """Of every router."""
        scheme = "https://" if self.config.router.cert_file else ""
        return [f"{scheme}{join_address(dialable(each.host), each.grpc_port)}" for each in router_settings(self.config)]

    @property
    def http_url(self) -> str:
        return self.http_urls[0]

    @property
    def grpc_address(self) -> str:
        return self.grpc_addresses[0]

    def admins(self) -> list[AdminClient]:
        """The administration API of every router, with its key; believes none but our own routers."""
        settings = self.config.router
        return [AdminClient(url, admin_key_of(settings), settings.cert_file) for url in self.http_urls]


# Returns the exit code of the command. Cancelled when the cluster has to stop.
Use = Callable[[LocalCluster], Awaitable[int]]


def run_local(config: ClusterConfig, report: Report, use: Use) -> int:
    """Start a cluster, run `use` when it is ready, stop it. Raises StartFailed when it does not get ready."""
    parent_pid = os.getppid()
    config = with_admin_key(config)
    hide_secrets()
    check_ports(config)
    try:
        with interruptible():
            return _run_services(config, report, use, parent_pid)
    except Interrupted as signal:
        report("pdserve", f"stopped ({signal}) while starting")
        # Not a normal exit: threads of a Ray that has half begun crash at times when the interpreter ends.
        sys.stdout.flush()
        os._exit(0)


def _run_services(config: ClusterConfig, report: Report, use: Use, parent_pid: int) -> int:
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(session())
        report("pdserve", f"logs are below {opened.runtime_dir} while it runs")
        redis = resolve_redis(config.redis_url, opened.runtime_dir, config.namespace)
        stack.callback(redis.stop)
        report("redis", "; ".join([f"ready ({redis.source})", *redis.warnings]))
        config = config.model_copy(update={"redis_url": redis.url})
        routers = []
        for idx in range(config.pools.routers):
            routers.append(_start_router(config, idx, opened.runtime_dir, report))
            stack.callback(routers[-1].stop)
        report("ray", "starting (some seconds)")
        stack.enter_context(local_ray(opened.runtime_dir))
        report("ray", "ready")
        return asyncio.run(_run(_Services(config, redis, routers, opened.runtime_dir), report, use, parent_pid))


def _start_router(config: ClusterConfig, idx: int, runtime_dir: Path, report: Report) -> Supervised:
    settings = router_settings(config)[idx]
    name = "router" if config.pools.routers == 1 else f"router {idx}"
    router = router_process(config.model_copy(update={"router": settings}), runtime_dir, name.replace(" ", "-"))
    router.start()
    report(name, f"starting on http port {settings.http_port}, gRPC port {settings.grpc_port}")
    return router


def check_ports(config: ClusterConfig) -> None:
    """Raise StartFailed if the public ports are taken; before anything is started."""
    host = config.router.host
    ports = [
        (port, flag)
        for settings in router_settings(config)
        for port, flag in (
            (settings.http_port, "--http-port"),
            (settings.grpc_port, "--grpc-port"),
            (settings.metrics_port or 0, "PDSERVE_ROUTER_METRICS_PORT"),
        )
    ]
    if len({port for port, _ in ports if port}) < sum(port > 0 for port, _ in ports):
        raise StartFailed("two routers would have the same port: choose --http-port and --grpc-port further apart")
    for port, flag in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise StartFailed(
                    f"port {port} on {host} cannot be used ({error.strerror}): is another pdserve up running? "
                    f"Choose another with {flag}."
                ) from error


@dataclass(frozen=True, slots=True)
class _Services:
    """What runs before the pools do. `config` has the URL of the Redis in it."""

    config: ClusterConfig
    redis: RedisServer
    routers: list[Supervised]
    runtime_dir: Path


async def _run(services: _Services, report: Report, use: Use, parent_pid: int) -> int:
    return await _Running(services, report).main(use, parent_pid)


class _Running:
    """The cluster from the start of its pools to their end. Made inside the loop that it runs in."""

    def __init__(self, services: _Services, report: Report) -> None:
        self._config = services.config
        self._redis = services.redis
        self._routers = services.routers
        self._report = report
        placement = LocalPlacement(services.config, log_dir(services.runtime_dir))
        self._pools = RayPools(services.config, report, placement, self._autoscaler())
        self._was_ready = False

    async def main(self, use: Use, parent_pid: int) -> int:
        store = PoolStore(self._config.redis_url, self._config.namespace)
        with stop_request(parent_pid) as stop:
            controller = asyncio.create_task(self._pools.run(store))
            try:
                return await first_result(
                    self._use_when_ready(use),
                    self._supervise(),
                    self._keep_redis(),
                    self._until_stopped(stop),
                    failure_of(controller),
                    watch_loading(self._config, self._report),
                )
            finally:
                await self._shut_down(stop, controller)
                controller.cancel()
                await asyncio.gather(controller, return_exceptions=True)
                await store.withdraw()
                await store.close()

    def _autoscaler(self) -> AutoscaleLoop | None:
        if not self._config.autoscale.enabled:
            return None
        return AutoscaleLoop(self._config.autoscale, LocalCluster(self._config).admins(), self._report)

    async def _use_when_ready(self, use: Use) -> int:
        for admin in LocalCluster(self._config).admins():
            notice = _StillNotice(lambda text: self._report("pdserve", text))
            while reasons := await asyncio.to_thread(_missing, admin):
                self._check_start()
                notice.look(reasons, self._pools.status(), time.monotonic())
                await asyncio.sleep(_POLL_INTERVAL_S)
        self._was_ready = True
        return await use(LocalCluster(self._config))

    def _check_start(self) -> None:
        """A worker that dies again and again before any was ready will not do better: say why instead."""
        for status in self._pools.status():
            if status.ready == 0 and status.num_crashes >= _MAX_START_CRASHES:
                raise StartFailed(f"no {status.role.value} worker gets ready. {status.last_failure}")

    async def _supervise(self) -> int:
        """Start routers again when they die."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            for router in self._routers:
                if router.has_ended:
                    self._restart(router)

    async def _keep_redis(self) -> int:
        """Start our Redis again when it dies. While it is away, routing goes by load alone."""
        own = self._redis.own
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            if own is None or not own.process.has_ended:
                continue
            self._report("redis", "died; starting it again, empty")
            if await own.start():
                self._report("redis", "ready again")
            else:
                self._report("redis", f"does not start, next try in {_REDIS_PAUSE_S:.0f} s: {own.process.log_tail(5)}")
                await asyncio.sleep(_REDIS_PAUSE_S)

    def _restart(self, router: Supervised) -> None:
        if not self._was_ready:
            raise StartFailed(f"the router does not start:\n{router.log_tail()}")
        self._report(router.name, "died; starting it again")
        router.restart()

    async def _until_stopped(self, stop: StopRequest) -> int:
        await stop.wait()
        self._report("pdserve", f"stopping ({stop.reason}); once more to stop at once")
        return 0

    async def _shut_down(self, stop: StopRequest, controller: "asyncio.Task[None]") -> None:
        """Let running requests finish within the grace, then end every worker."""
        for router in self._routers:
            router.terminate()
        if controller.done():
            return  # a bug ended it, and no controller follows the workers to their end
        limit_s = self._config.pools.drain_grace_s + _KILL_LIMIT_S
        await first_result(self._pools.empty(), stop.wait_hurried(), asyncio.sleep(limit_s))
        self._pools.kill_all()


class _StillNotice:
    """Says once why a cluster is not ready, when nothing has been on its way for a while: it may never be."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._now: tuple[Sequence[str], Sequence[PoolStatus]] = (), ()
        self._since_s = math.inf
        self._was_said = False

    def look(self, reasons: Sequence[str], pools: Sequence[PoolStatus], now_s: float) -> None:
        if (reasons, pools) != self._now or not all(pool.is_still for pool in pools):
            self._now, self._since_s, self._was_said = (reasons, pools), now_s, False
        elif not self._was_said and now_s >= self._since_s + STILL_S:
            self._was_said = True
            self._report("; ".join(["not ready: " + ", ".join(reasons), *map(_advice, filter(_is_empty, pools))]))


def _is_empty(pool: PoolStatus) -> bool:
    return pool.desired == 0


def _advice(pool: PoolStatus) -> str:
    return f"its pool is to have none, pdserve scale {pool.role}=1 starts one"


def _missing(admin: AdminClient) -> Sequence[str]:
    """What a router lacks to serve a request; empty = nothing."""
    try:
        readiness = admin.readiness()
    except AdminFailed:
        return ["the router does not answer"]
    return () if readiness["status"] == "ready" else readiness["reasons"]
