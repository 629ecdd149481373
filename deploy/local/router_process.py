"""A router of a local cluster: `pdserve router` in a child process, started again when it dies."""

import os
import sys
from pathlib import Path

from common.values.config import ClusterConfig, RouterSettings
from deploy.config.variables import ENV_PREFIX, INHERITED
from deploy.process.child import Child, StartFailed, start_child

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


class RouterProcess:
    """Owns the child. Start and restart it from the main thread: the child dies with the thread that made it."""

    def __init__(self, config: ClusterConfig, runtime_dir: Path, name: str) -> None:
        self.name = name
        self.num_restarts = 0
        self._config_path = runtime_dir / f"{name}.json"
        self._log_path = runtime_dir / f"{name}.log"
        self._child: Child | None = None
        self._config_path.touch(mode=0o600)  # it holds the password of Redis
        self._config_path.write_text(config.model_dump_json())

    @property
    def has_ended(self) -> bool:
        return self._child is None or self._child.has_ended

    def start(self) -> None:
        command = [sys.executable, "-m", "deploy.cli", "router", "--config", str(self._config_path)]
        env = {name: value for name, value in os.environ.items() if _is_for_child(name)}
        self._child = start_child(self.name, command, self._log_path, env=env)

    def restart(self) -> None:
        """Raises StartFailed when it dies again and again."""
        if self.num_restarts >= _MAX_RESTARTS:
            raise StartFailed(f"{self.name} died {self.num_restarts} times: {self.log_tail()}")
        self.num_restarts += 1
        self.start()

    def log_tail(self) -> str:
        return "" if self._child is None else self._child.log_tail()

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(STOP_GRACE_S)


def _is_for_child(name: str) -> bool:
    """Settings come from its file."""
    return name in INHERITED or not name.startswith(ENV_PREFIX)
