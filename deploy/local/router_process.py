"""A router of a local cluster: `pdserve router` in a child process, started again when it dies."""

import os
import sys
from pathlib import Path

from common.values.config import ClusterConfig, RouterSettings
from deploy.config.variables import ENV_PREFIX, INHERITED
from deploy.process.child import Child, start_child
from deploy.process.supervised import Supervised

STOP_GRACE_S = 8.0
_MAX_RESTARTS = 20


def router_settings(config: ClusterConfig) -> list[RouterSettings]:
    """One per router: ports follow each other, and so do names where one was given."""
    if config.pools.routers == 1:
        return [config.router]
    return [_router_settings(config.router, idx) for idx in range(config.pools.routers)]


def _router_settings(settings: RouterSettings, idx: int) -> RouterSettings:
    metrics_port = settings.metrics_port
    changes = {
        "router_id": f"{settings.router_id}-{idx}" if settings.router_id else "",
        "http_port": _following(settings.http_port, idx),
        "grpc_port": _following(settings.grpc_port, idx),
        "metrics_port": None if metrics_port is None else _following(metrics_port, idx),
    }
    return settings.model_copy(update=changes)


def _following(port: int, idx: int) -> int:
    """0 stays: any free one."""
    return port + idx if port else 0


def router_process(config: ClusterConfig, runtime_dir: Path, name: str) -> Supervised:
    """The router of this configuration, not started yet."""
    config_path, log_path = runtime_dir / f"{name}.json", runtime_dir / f"{name}.log"
    config_path.touch(mode=0o600)  # it holds the password of Redis
    config_path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "deploy.cli", "router", "--config", str(config_path)]

    def launch() -> Child:
        env = {name: value for name, value in os.environ.items() if _is_for_child(name)}
        return start_child(name, command, log_path, env=env)

    return Supervised(name, launch, STOP_GRACE_S, _MAX_RESTARTS)


def _is_for_child(name: str) -> bool:
    """Settings come from its file."""
    return name in INHERITED or not name.startswith(ENV_PREFIX)
