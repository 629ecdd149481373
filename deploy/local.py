"""A whole cluster on this machine: Redis, Ray, one router, the pools. Starts it, uses it, leaves nothing behind.

    check ports and model -> session (directory, guardian) -> Redis -> router -> Ray -> pools -> ready -> use it
    -> router stops taking requests, workers drain -> Ray, router, Redis end -> what is left of the session ends

Everything is started from the main thread: the kernel ends a child when the thread that made it does.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.config import ClusterConfig
from common.pools import PoolStore
from deploy.admin import AdminClient
from deploy.autoscale_loop import AutoscaleLoop
from deploy.placement import LocalPlacement
from deploy.process import StartFailed
from deploy.ray_local import local_ray
from deploy.ray_pool import RayPools
from deploy.redis_server import RedisServer, resolve_redis
from deploy.router_process import RouterProcess
from deploy.session import session
from deploy.stopping import StopRequest, first_result, stop_request

_POLL_INTERVAL_S = 0.2
_MAX_START_CRASHES = 2
_KILL_LIMIT_S = 10.0

# What is happening, for whoever waits: (who, what).
Report = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that is ready, while it lasts."""

    config: ClusterConfig

    @property
    def http_url(self) -> str:
        return f"http://{self.config.router.host}:{self.config.router.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.config.router.host}:{self.config.router.grpc_port}"


# Returns the exit code of the command. Cancelled when the cluster has to stop.
Use = Callable[[LocalCluster], Awaitable[int]]


def run_local(config: ClusterConfig, report: Report, use: Use) -> int:
    """Start a cluster, run `use` when it is ready, stop it. Raises StartFailed when it does not get ready."""
    parent_pid = os.getppid()
    check_ports(config)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(session())
        report("pdserve", f"logs are below {opened.runtime_dir} while it runs")
        redis = resolve_redis(config.redis_url, opened.runtime_dir)
        stack.callback(redis.stop)
        report("redis", f"ready ({redis.source})")
        config = config.model_copy(update={"redis_url": redis.url})
        router = RouterProcess(config, opened.runtime_dir)
        router.start()
        stack.callback(router.stop)
        report("router", f"starting on http port {config.router.http_port}, gRPC port {config.router.grpc_port}")
        report("ray", "starting (some seconds)")
        stack.enter_context(local_ray(opened.runtime_dir))
        report("ray", "ready")
        return asyncio.run(_run(_Services(config, redis, router), report, use, parent_pid))


def check_ports(config: ClusterConfig) -> None:
    """Raise StartFailed if somebody listens on the public ports already; before anything is started."""
    host = config.router.host
    for port, flag in ((config.router.http_port, "--http-port"), (config.router.grpc_port, "--grpc-port")):
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
    router: RouterProcess


async def _run(services: _Services, report: Report, use: Use, parent_pid: int) -> int:
    return await _Running(services, report).main(use, parent_pid)


class _Running:
    """The cluster from the start of its pools to their end. Made inside the loop that it runs in."""

    def __init__(self, services: _Services, report: Report) -> None:
        self._config = services.config
        self._redis = services.redis
        self._router = services.router
        self._report = report
        self._pools = RayPools(services.config, report, LocalPlacement(services.config), self._autoscaler())
        self._was_ready = False

    async def main(self, use: Use, parent_pid: int) -> int:
        store = PoolStore(self._config.redis_url, self._config.namespace)
        with stop_request(parent_pid) as stop:
            controller = asyncio.create_task(self._pools.run(store))
            try:
                return await first_result(
                    self._use_when_ready(use), self._supervise(), self._until_stopped(stop), _end_of(controller)
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
        client = AdminClient(LocalCluster(self._config).http_url, self._config.router.admin_key)
        return AutoscaleLoop(self._config.autoscale, client, self._report)

    async def _use_when_ready(self, use: Use) -> int:
        while not await self._router.is_ready():
            self._check_start()
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._was_ready = True
        return await use(LocalCluster(self._config))

    def _check_start(self) -> None:
        """A worker that dies again and again before any was ready will not do better: say why instead."""
        for status in self._pools.status():
            if status.ready == 0 and status.num_crashes >= _MAX_START_CRASHES:
                raise StartFailed(f"no {status.role.value} worker gets ready. {status.last_failure}")

    async def _supervise(self) -> int:
        """Start the router and our Redis again when they die."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            if self._router.has_ended:
                self._restart_router()
            if self._redis.own is not None and self._redis.own.has_ended:
                self._report("redis", "died; starting it again, empty")
                self._redis.own.start()
                await asyncio.sleep(1.0)

    def _restart_router(self) -> None:
        if not self._was_ready:
            raise StartFailed(f"the router does not start:\n{self._router.log_tail()}")
        self._report("router", "died; starting it again")
        self._router.restart()

    async def _until_stopped(self, stop: StopRequest) -> int:
        await stop.wait()
        self._report("pdserve", f"stopping ({stop.reason}); once more to stop at once")
        return 0

    async def _shut_down(self, stop: StopRequest, controller: "asyncio.Task[None]") -> None:
        """Let running requests finish within the grace, then end every worker."""
        self._router.terminate()
        if controller.done():
            return  # a bug ended it, and nobody would follow the workers to their end
        limit_s = self._config.pools.drain_grace_s + _KILL_LIMIT_S
        await first_result(self._pools.empty(), stop.wait_hurried(), asyncio.sleep(limit_s))
        self._pools.kill_all()


async def _end_of(controller: "asyncio.Task[None]") -> int:
    """The pool controller never returns: what it raises is a bug and ends the cluster."""
    await asyncio.shield(controller)
    raise AssertionError("the pool controller ended")
