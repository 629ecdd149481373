"""What the commands of `main` do, apart from parsing options. Prints to people on stdout, progress on stderr."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from common.values.config import ClusterConfig
from deploy.cli.progress import progress
from deploy.client import show
from deploy.client.admin import AdminClient, AdminFailed
from deploy.client.waiting import wait_for_sizes, wait_until_gone, wait_until_settled
from deploy.config.bind_checks import check_router, check_worker
from deploy.config.settings import load_settings
from deploy.config.variables import InvalidSettings, env_name


def run_up(config: ClusterConfig, *, as_json: bool) -> int:
    """`pdserve up`: a cluster until a signal ends it."""
    from deploy.local.cluster import LocalCluster, run_local

    check_router(config)
    _check_keys(config)
    for role in ("prefill", "decode"):
        check_worker(config, role)
    config = with_model(config)

    async def serve(cluster: LocalCluster) -> int:
        client = cluster.admins()[0]
        state = await asyncio.to_thread(client.state)
        model = await asyncio.to_thread(client.model_name)
        if as_json:
            description = {"http": cluster.http_url, "grpc": cluster.grpc_address, "model": model, **state}
            print(json.dumps(description), flush=True)
        else:
            print("\n".join(["", *show.workers_table(state["workers"]), ""]), flush=True)
            for http_url, grpc_address in zip(cluster.http_urls[1:], cluster.grpc_addresses[1:], strict=True):
                print(f"HTTP  {http_url}/v1  gRPC  {grpc_address}  (another router of the same cluster)", flush=True)
            print("\n".join([*show.endpoints(cluster.http_url, cluster.grpc_address, model), ""]), flush=True)
            progress("pdserve", "ready; Ctrl-C drains and stops everything")
        await asyncio.Event().wait()
        return 0

    return run_local(config, progress, serve)


def _check_keys(config: ClusterConfig) -> None:
    """Raise InvalidKeyFile before anything is started: the router would, after Ray and the workers began."""
    from router.tenants.key_file import parse_key_file
    from router.tenants.key_watch import WatchedFile, admin_key_of

    if config.router.api_keys_file:
        WatchedFile(config.router.api_keys_file, parse_key_file, lambda tenants: None).read()
    if config.router.admin_key_file:
        WatchedFile(config.router.admin_key_file, admin_key_of, lambda key: None).read()


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with a model path that exists: the demo model when none was named."""
    from router.text.tokenizer import check_model

    path = config.model.path
    if not path:
        path = str(demo_model(lambda text: progress("model", text)))
    check_model(path)  # one that cannot be used is refused before anything is started
    # A link is not followed: its name is the model's.
    model = config.model.model_copy(update={"path": os.path.abspath(Path(path).expanduser())})
    return config.model_copy(update={"model": model})


def demo_model(say: Callable[[str], None]) -> Path:
    """The demo model's file, fetched if it is not cached. Raises InvalidSettings where it cannot be kept."""
    from common.checkpoint.demo_model import cache_directory, fetch_demo_model

    try:
        return fetch_demo_model(say)
    except (OSError, RuntimeError) as error:  # no writable cache, or not even a home
        reason = getattr(error, "strerror", None) or str(error)
        text = (
            f"the demo model cannot be kept in {cache_directory()}: {reason}" if isinstance(error, OSError) else reason
        )
        raise InvalidSettings(f"{text}; name a directory in $PDSERVE_CACHE, or a model with --model") from error


def show_status(url: str, *, as_json: bool, wait_s: float | None = None) -> int:
    """`pdserve status`. 0 when a request would be served, 3 when not. `wait_s`: first wait for the pools to settle."""
    client = AdminClient(url)
    if wait_s is not None:
        wait_until_settled(client, wait_s, lambda text: progress("status", text))
    state, readiness = client.state(), client.readiness()
    is_ready = readiness.get("status") == "ready"
    if as_json:
        print(json.dumps({**state, "ready": is_ready, "reasons": readiness.get("reasons", [])}))
    else:
        pools = state.get("pools") or {}
        print(show.pools_line(state["workers"], pools))
        print("\n".join(show.workers_table(state["workers"])))
        print("\n".join([*show.loading_lines(state["loading"], state["workers"]), *show.controller_lines(pools)]))
        print("\n".join(show.routers_table(state["routers"])))
        for reason in readiness.get("reasons", []):
            print(f"not ready: {reason}")
    return 0 if is_ready else 3


def run_scale(url: str, sizes: dict[str, int], timeout_s: float, *, as_json: bool, is_waiting: bool = True) -> None:
    """`pdserve scale`: returns when the pools have the sizes, or at once."""
    client = AdminClient(url)
    client.scale(sizes)
    if is_waiting:
        wait_for_sizes(client, sizes, timeout_s, lambda text: progress("scale", text))
    said = "has" if is_waiting else "is to have"
    text = ", ".join(f"{role} {said} {replicas}" for role, replicas in sizes.items())
    print(json.dumps(sizes) if as_json else f"{'done' if is_waiting else 'asked'}: {text}")


def run_drain(url: str, worker_id: str, grace_s: float | None, timeout_s: float, *, is_waiting: bool = False) -> None:
    """`pdserve drain`: returns when this life of the worker is over, or when its pool has replaced it."""
    client = AdminClient(url)
    found = [worker for worker in client.state()["workers"] if worker["worker_id"] == worker_id]
    if not found:
        raise AdminFailed(f"no worker {worker_id!r}; pdserve status lists them")
    client.drain(worker_id, grace_s)
    progress("drain", f"{worker_id} takes no new work and finishes what it has")
    wait_until_gone(client, found[0], timeout_s)
    if is_waiting:
        wait_until_settled(client, timeout_s, lambda text: progress("drain", text))
    print(f"done: {worker_id} {'was replaced' if is_waiting else 'is gone'}")


def run_router(config: ClusterConfig) -> None:
    """`pdserve router`: serves until a signal."""
    from common.cluster.pools import PoolStore
    from common.telemetry.logs import configure_logs
    from router.app import run

    check_router(config)
    config = with_model(_with_redis(config))
    router = config.router_config()
    configure_logs(router.router_id)
    pools = PoolStore(config.redis_url, config.namespace)
    run(router, scale_pools=pools.set_desired, pool_status=pools.get_status)


def run_deploy(config: ClusterConfig, ray_address: str, *, is_down: bool) -> int:
    """`pdserve deploy`: keeps the pools on a Ray cluster until a signal. Models are where the nodes have them."""
    from deploy.ray import deploy as deploy_ray

    config = _with_redis(config)
    if not config.model.path:
        raise InvalidSettings("model.path is not set: name a model that every node has")
    if config.autoscale.enabled and not config.autoscale.router_url:
        raise InvalidSettings("autoscale.router_url is not set: the load is asked of a router")
    return deploy_ray.run_deploy(config, ray_address, progress, is_down=is_down)


def run_one_worker(config: ClusterConfig, role: Literal["prefill", "decode"], worker_id: str) -> None:
    """`pdserve worker`: serves until a signal, then drains."""
    from common.telemetry.logs import configure_logs
    from deploy.worker.process import run_worker

    check_worker(config, role)
    config = with_model(_with_redis(config))
    configure_logs(worker_id)
    run_worker(config.worker_config(role, worker_id), config.pools.drain_grace_s)


def show_config(config_file: Path | None, *, as_json: bool) -> None:
    """`pdserve config show`."""
    values = load_settings({}, config_file).values
    if as_json:
        rows = [{"name": v.path, "value": v.shown, "origin": v.origin, "env": env_name(v.path)} for v in values]
        print(json.dumps(rows, indent=2))
        return
    header = ("setting", "value", "from", "environment variable")
    print("\n".join(show.table([header, *((v.path, v.shown, v.origin, env_name(v.path)) for v in values)])))


def _with_redis(config: ClusterConfig) -> ClusterConfig:
    if not config.redis_url:
        raise InvalidSettings("redis_url is not set: give --redis-url or PDSERVE_REDIS_URL")
    return config
