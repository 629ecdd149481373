"""What the commands of `main` do, apart from parsing options. Prints to people on stdout, progress on stderr."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Literal

from common.values.config import ClusterConfig
from deploy.client import show
from deploy.client.admin import AdminClient, AdminFailed, wait_for_sizes, wait_until_gone
from deploy.config.bind_checks import check_router, check_worker
from deploy.config.settings import load_settings
from deploy.config.variables import InvalidSettings, env_name


def progress(who: str, what: str) -> None:
    """One line about what is happening, for whoever waits."""
    print(f"==> {who}: {what}", file=sys.stderr, flush=True)


def run_up(config: ClusterConfig, *, as_json: bool) -> int:
    """`pdserve up`: a cluster until somebody ends it."""
    from deploy.local.cluster import LocalCluster, run_local

    check_router(config)
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


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with a model path that exists: the demo model when none was named."""
    from common.checkpoint import open_checkpoint
    from common.checkpoint.demo_model import fetch_demo_model

    path = config.model.path
    if not path:
        path = str(fetch_demo_model(lambda text: progress("model", text)))
    open_checkpoint(path)  # a model that cannot be used is refused before anything is started
    model = config.model.model_copy(update={"path": str(Path(path).expanduser().resolve())})
    return config.model_copy(update={"model": model})


def show_status(url: str, *, as_json: bool) -> int:
    """`pdserve status`. 0 when a request would be served, 3 when not."""
    client = AdminClient(url)
    state, readiness = client.state(), client.readiness()
    is_ready = readiness.get("status") == "ready"
    if as_json:
        print(json.dumps({**state, "ready": is_ready, "reasons": readiness.get("reasons", [])}))
    else:
        print(show.pools_line(state["workers"]))
        print("\n".join(show.workers_table(state["workers"])))
        print("\n".join([*show.loading_lines(state["loading"]), *show.controller_lines(state.get("pools") or {})]))
        print("\n".join(show.routers_table(state["routers"])))
        for reason in readiness.get("reasons", []):
            print(f"not ready: {reason}")
    return 0 if is_ready else 3


def run_scale(url: str, sizes: dict[str, int], timeout_s: float, *, as_json: bool) -> None:
    """`pdserve scale`: returns when the pools have the sizes."""
    client = AdminClient(url)
    client.scale(sizes)
    wait_for_sizes(client, sizes, timeout_s, lambda text: progress("scale", text))
    text = ", ".join(f"{role} has {replicas}" for role, replicas in sizes.items())
    print(json.dumps(sizes) if as_json else f"done: {text}")


def run_drain(url: str, worker_id: str, grace_s: float | None, timeout_s: float) -> None:
    """`pdserve drain`: returns when this life of the worker is over."""
    client = AdminClient(url)
    found = [worker for worker in client.state()["workers"] if worker["worker_id"] == worker_id]
    if not found:
        raise AdminFailed(f"no worker {worker_id!r}; pdserve status lists them")
    client.drain(worker_id, grace_s)
    progress("drain", f"{worker_id} takes no new work and finishes what it has")
    wait_until_gone(client, found[0], timeout_s)
    print(f"done: {worker_id} is gone")


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
