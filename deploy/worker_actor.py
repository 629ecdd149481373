"""The Ray actor that holds a worker. It imports the worker's own class inside the actor, so that whoever places
actors never loads torch. No decisions here.
"""

import importlib
from typing import Any, Protocol, cast

from common.messages import Role

ACTOR_CLASSES = {
    Role.PREFILL: "prefill_worker.actor:PrefillActor",
    Role.DECODE: "decode_worker.actor:DecodeActor",
}


class HostedWorker(Protocol):
    """What the class named in the constructor offers; `common.worker.host.WorkerHost` does."""

    def start(self) -> dict[str, Any]: ...

    def wait(self) -> None: ...

    def drain(self, grace_s: float) -> None: ...

    def stop(self) -> None: ...


class WorkerActor:
    """One worker in an actor process. `class_name` is "module:Class", made with the configuration as JSON."""

    def __init__(self, class_name: str, config_json: str) -> None:
        module, _, name = class_name.partition(":")
        self._worker = cast(HostedWorker, getattr(importlib.import_module(module), name)(config_json))

    def start(self) -> dict[str, Any]:
        """Load and serve; the worker's description once it is ready."""
        return self._worker.start()

    def wait(self) -> None:
        """Return when the worker has ended after a drain; raise what ended it otherwise."""
        self._worker.wait()

    def drain(self, grace_s: float) -> None:
        self._worker.drain(grace_s)

    def stop(self) -> None:
        self._worker.stop()
