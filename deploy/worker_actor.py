"""The Ray actor that holds a worker. It imports the worker's own class inside the actor, so that whoever places
actors never loads torch. No decisions here.
"""

import importlib
import threading
from typing import Any, Protocol, cast

from common.messages import Role

ACTOR_CLASSES = {
    Role.PREFILL: "prefill_worker.actor:PrefillActor",
    Role.DECODE: "decode_worker.actor:DecodeActor",
}


class HostedWorker(Protocol):
    """What the class named in the constructor offers; `common.worker.host.WorkerHost` does."""

    def start(self) -> dict[str, Any]: ...

    def wait(self, limit_s: float) -> bool: ...

    def drain(self, grace_s: float) -> None: ...

    def stop(self) -> None: ...


class WorkerActor:
    """One worker in an actor process. `class_name` is "module:Class", made with the configuration as JSON.

    `is_fitted_to_node`: the configuration leaves address, threads and GPU to the node that the actor is on.
    """

    def __init__(self, class_name: str, config_json: str, *, is_fitted_to_node: bool = False) -> None:
        if is_fitted_to_node:
            from deploy.node import fit_to_node

            config_json = fit_to_node(config_json)
        module, _, name = class_name.partition(":")
        self._worker = cast(HostedWorker, getattr(importlib.import_module(module), name)(config_json))
        self._starting = threading.Lock()
        self._description: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        """Load and serve; the worker's description once it is ready. A later controller asks again."""
        with self._starting:
            if self._description is None:
                self._description = self._worker.start()
            return self._description

    def wait(self, limit_s: float) -> bool:
        """True when the worker has ended after a drain, False when `limit_s` is over; raises what ended it otherwise.

        Limited, since nobody ends the call of a controller that is gone.
        """
        return self._worker.wait(limit_s)

    def drain(self, grace_s: float) -> None:
        self._worker.drain(grace_s)

    def stop(self) -> None:
        self._worker.stop()
