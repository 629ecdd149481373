"""`pdserve deploy`: the pool controller on a Ray cluster that is there already, as KubeRay's or one of `ray start`.

Runs on a node of that cluster. Its workers outlive it: a controller that begins finds those of its namespace and goes
on with them; only `is_down` ends them. Redis and routers are somebody else's.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

from common.cluster.pools import PoolStore
from common.values.config import ClusterConfig
from deploy.client.admin import AdminClient
from deploy.client.credentials import admin_key_of
from deploy.client.loading_watch import watch_loading
from deploy.process.child import StartFailed
from deploy.process.stopping import StopRequest, failure_of, first_result, stop_request
from deploy.ray.driver import own_manners
from deploy.ray.placement import RAY_NAMESPACE, ClusterPlacement, Placement
from deploy.ray.pools import RayPools, Report
from deploy.scaling.autoscale_loop import AutoscaleLoop

_KILL_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 5.0
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "GLOG_minloglevel": "2", "grpc_proxy": ""}


def run_deploy(config: ClusterConfig, ray_address: str, report: Report, *, is_down: bool) -> int:
    """Keep the pools until a signal, or with `is_down` drain and end every worker. Raises StartFailed."""
    parent_pid = os.getppid()
    with existing_ray(ray_address):
        report("ray", f"connected to the cluster at {ray_address}")
        return asyncio.run(_Controller(config, report, ClusterPlacement(config)).main(parent_pid, is_down=is_down))


@contextlib.contextmanager
def existing_ray(address: str) -> Iterator[None]:
    """Be a driver of the cluster; leaving it leaves its detached actors alone. Raises StartFailed."""
    _check_reachable(address)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    try:
        with own_manners():
            ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StartFailed(f"no Ray cluster can be used at {address}: {first}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray ends the process when no handler listens."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto", or what Ray explains itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise StartFailed(f"no Ray cluster can be used at {address}: {error}") from error


class _Controller:
    """Owns the pools and their store while the command runs. Made outside the loop, used inside."""

    def __init__(self, config: ClusterConfig, report: Report, placement: Placement) -> None:
        self._config = config
        self._report = report
        self._placement = placement

    async def main(self, parent_pid: int, *, is_down: bool) -> int:
        pools = RayPools(self._config, self._report, self._placement, None if is_down else self._autoscaler())
        store = PoolStore(self._config.redis_url, self._config.namespace)
        with stop_request(parent_pid) as stop:
            controller = asyncio.create_task(pools.run(store))
            until = self._until_down(pools, stop) if is_down else self._until_stopped(stop)
            try:
                return await first_result(until, failure_of(controller), watch_loading(self._config, self._report))
            finally:
                controller.cancel()
                await asyncio.gather(controller, return_exceptions=True)
                await store.withdraw()
                await store.close()

    def _autoscaler(self) -> AutoscaleLoop | None:
        settings = self._config.autoscale
        if not settings.enabled:
            return None
        urls = [url.strip() for url in settings.router_url.split(",")]
        clients = [AdminClient(url, admin_key_of(self._config.router) or None) for url in urls if url]
        return AutoscaleLoop(settings, clients, self._report)

    async def _until_stopped(self, stop: StopRequest) -> int:
        await stop.wait()
        self._report("pdserve", f"the controller ends ({stop.reason}); the workers go on")
        return 0

    async def _until_down(self, pools: RayPools, stop: StopRequest) -> int:
        limit_s = self._config.pools.drain_grace_s + _KILL_LIMIT_S
        await first_result(pools.empty(), stop.wait_hurried(), asyncio.sleep(limit_s))
        pools.kill_all()
        self._report("pdserve", "no worker is left")
        return 0
