"""The Ray actor that holds a worker. It imports the worker's own class inside the actor, so that the code that places
actors never loads torch. No decisions here.
"""

import importlib
import json
import signal
import threading
from typing import Any, Protocol, cast

from common.telemetry.logs import configure_logs, get_logger

# As long as pools.drain_grace_s is by default; the actor does not get that setting.
SIGTERM_GRACE_S = 30.0
WORKER_CLASS = "deploy.worker.roles:WorkerOfAnyRole"


class HostedWorker(Protocol):
    """What the class named in the constructor offers; `common.worker.host.WorkerHost` does."""

    def start(self) -> dict[str, Any]: ...

    def wait(self, limit_s: float) -> bool: ...

    def change_role(self, config_json: str, grace_s: float) -> dict[str, Any]: ...

    def drain(self, grace_s: float) -> None: ...

    def stop(self) -> None: ...


class WorkerActor:
    """One worker in an actor process. `class_name` is "module:Class", made with the configuration as JSON.

    `is_fitted_to_node`: the configuration leaves address, threads and GPU to the node that the actor is on.
    """

    def __init__(self, class_name: str, config_json: str, *, is_fitted_to_node: bool = False) -> None:
        if is_fitted_to_node:
            from deploy.ray.node import fit_to_node

            config_json = fit_to_node(config_json)
        configure_logs(str(json.loads(config_json).get("worker_id", "worker")))
        module, _, name = class_name.partition(":")
        self._worker = cast(HostedWorker, getattr(importlib.import_module(module), name)(config_json))
        self._changing = threading.Lock()
        self._description: dict[str, Any] | None = None
        self._identity = _identity_of(config_json)
        signal.signal(signal.SIGTERM, self._on_sigterm)  # over Ray's, which ends the process

    def identity(self) -> dict[str, str]:
        """`role` and `worker_id`, at once: of what it serves, or is on its way to serve."""
        return dict(self._identity)

    def start(self) -> dict[str, Any]:
        """Load and serve; the worker's description once it is ready. A later controller asks again."""
        with self._changing:
            if self._description is None:
                self._description = self._worker.start()
            return self._description

    def change_role(self, config_json: str, grace_s: float) -> dict[str, Any]:
        """Drain, then serve as configured, without loading; the new description once it is ready.

        A refusal or failure is raised; the identity is then what it was.
        """
        with self._changing:
            before, self._identity = self._identity, _identity_of(config_json)
            try:
                self._description = self._worker.change_role(config_json, grace_s)
            except BaseException:
                self._identity = before
                raise
            return self._description

    def wait(self, limit_s: float) -> bool:
        """True when the worker has ended after a drain, False when `limit_s` is over; raises what ended it otherwise.

        Limited, since the call of a controller that is gone would never end.
        """
        return self._worker.wait(limit_s)

    def drain(self, grace_s: float) -> None:
        self._worker.drain(grace_s)

    def stop(self) -> None:
        self._worker.stop()

    def _on_sigterm(self, number: int, frame: object) -> None:
        """The sender wants the worker gone, not its requests lost."""
        get_logger().info("worker_drains_on_signal", **self._identity)
        self._worker.drain(SIGTERM_GRACE_S)


def _identity_of(config_json: str) -> dict[str, str]:
    config = json.loads(config_json)
    return {"role": config["role"], "worker_id": config["worker_id"]}
