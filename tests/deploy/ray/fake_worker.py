"""A worker that loads nothing: what the pool controller sees of one. Its model's path says how it behaves."""

import os
import threading
from pathlib import Path
from typing import Any

from common.values.config import WorkerConfig


class FakeWorker:
    """`path` = "fails": start raises. "stubborn": drain is ignored. Anything else: a directory for its environment."""

    def __init__(self, config_json: str) -> None:
        self._config = WorkerConfig.model_validate_json(config_json)
        self._drained = threading.Event()

    def start(self) -> dict[str, Any]:
        if self._config.model.path == "fails":
            raise ValueError("no such model")
        directory = Path(self._config.model.path)
        if directory.is_dir():
            environment = "\n".join(f"{name}={value}" for name, value in os.environ.items())
            (directory / self._config.worker_id).write_text(environment)
        return {"worker_id": self._config.worker_id, "pid": os.getpid(), "address": f"{self._config.host}:1"}

    def change_role(self, config_json: str, grace_s: float) -> dict[str, Any]:
        """As the real host does, without a drain to wait for."""
        config = WorkerConfig.model_validate_json(config_json)
        self._config = config
        return {"worker_id": config.worker_id, "pid": os.getpid(), "address": f"{config.host}:2"}

    def wait(self, limit_s: float) -> bool:
        return self._drained.wait(limit_s)

    def drain(self, grace_s: float) -> None:
        if self._config.model.path != "stubborn":
            self._drained.set()

    def stop(self) -> None:
        self._drained.set()
