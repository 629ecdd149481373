"""The options of the commands that deployments run: one router, one worker, the pools of a Ray cluster."""

from typing import Annotated

import typer

from deploy.cli.options import (
    Autoscale,
    ConfigFile,
    GrpcPort,
    HttpPort,
    Insecure,
    LocalPrefill,
    Lora,
    Model,
    RedisUrl,
    Role,
    Tls,
    Traces,
)


def router(
    model: Model = None,
    lora: Lora = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    local_prefill_max_tokens: LocalPrefill = None,
    redis_url: RedisUrl = None,
    otlp_traces_endpoint: Traces = None,
    tls: Tls = None,
    insecure: Insecure = None,
    config: ConfigFile = None,
) -> None:
    """Run one router: both APIs.

    Workers, and the other routers of the cluster, are found in Redis.
    """
    from deploy.cli.commands import run_router
    from deploy.config.settings import load_settings, tls_flags

    flags = {
        "model.path": model,
        "router.lora": tuple(lora) if lora else None,
        "router.host": host,
        "router.http_port": http_port,
        "router.grpc_port": grpc_port,
        "router.local_prefill_max_tokens": local_prefill_max_tokens,
        "router.otlp_traces_endpoint": otlp_traces_endpoint,
        "redis_url": redis_url,
        "insecure": insecure,
        **tls_flags(tls),
    }
    run_router(load_settings(flags, config).config)


def worker(
    role: Annotated[Role, typer.Option(help="What the worker does.")],
    worker_id: Annotated[str, typer.Option(help="Name of the worker; unique in the cluster.")],
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, and where others reach it.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="gRPC port; 0 = any free one.")] = None,
    redis_url: RedisUrl = None,
    tls: Tls = None,
    insecure: Insecure = None,
    config: ConfigFile = None,
) -> None:
    """Run one worker in this process, without Ray."""
    from deploy.cli.commands import run_one_worker
    from deploy.config.settings import load_settings, tls_flags

    pool = f"{role.value}_worker"
    flags = {
        "model.path": model,
        f"{pool}.host": host,
        f"{pool}.port": port,
        "redis_url": redis_url,
        "insecure": insecure,
        **tls_flags(tls),
    }
    run_one_worker(load_settings(flags, config).config, role.value, worker_id)


def deploy(
    ray_address: Annotated[str, typer.Option(help="Ray cluster, as HOST:PORT or auto; this is one of its nodes.")],
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers (1).")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers (1).")] = None,
    autoscale: Autoscale = None,
    down: Annotated[bool, typer.Option("--down", help="Drain and end every worker instead.")] = False,
    redis_url: RedisUrl = None,
    config: ConfigFile = None,
) -> None:
    """Keep both pools on an existing Ray cluster.

    Workers outlive this command; --down ends them.
    """
    from deploy.cli.commands import run_deploy
    from deploy.config.settings import load_settings

    flags = {
        "pools.prefill": prefill,
        "pools.decode": decode,
        "autoscale.enabled": autoscale,
        "redis_url": redis_url,
    }
    raise typer.Exit(run_deploy(load_settings(flags, config).config, ray_address, is_down=down))
