"""Runs a worker in a thread with an event loop of its own, so that a Ray actor (or a test) can hold it.

The actor's own threads only start, drain and wait; no token ever passes through them.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any

import uvloop

from common.values.config import WorkerConfig
from common.worker.control import RoleChangeFailed, WorkerControl
from common.worker.role_change import at_the_place_of, check_role_change

Serve = Callable[[WorkerConfig, WorkerControl], Awaitable[None]]


class WorkerHost:
    """One worker in this process. `start` once, then `wait`; the rest from any thread."""

    def __init__(self, config_json: str, serve: Serve) -> None:
        self._config = WorkerConfig.model_validate_json(config_json)
        self._serve = serve
        self._control: WorkerControl | None = None
        self._ready: Future[dict[str, Any]] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> dict[str, Any]:
        """Load and serve; returns worker_id, incarnation, address, pid once ready. Raises what start-up raised."""
        self._thread.start()
        return self._ready.result()

    def wait(self, limit_s: float) -> bool:
        """True when the worker has ended by drain or stop, False after `limit_s`; raises what ended it otherwise."""
        done, _ = wait([self._ended], limit_s)
        if done:
            self._ended.result()
        return bool(done)

    def change_role(self, config_json: str, grace_s: float) -> dict[str, Any]:
        """Drain this role and serve that of the new configuration without loading; what `start` says, of the new one.

        Raises RoleChangeRefused, with the field's name, when the weights cannot serve it: the old role then goes on.
        Raises RoleChangeFailed when the worker is busy with another change, or ends before it is ready.
        """
        config = WorkerConfig.model_validate_json(config_json)
        check_role_change(self._config, config)
        config = at_the_place_of(self._config, config)
        if self._control is None:
            raise RoleChangeFailed("the worker has not started yet")
        description = self._control.request_role(config, grace_s).result()
        self._config = config
        return description

    def drain(self, grace_s: float) -> None:
        """Refuse new work, finish what is there, end. Returns at once."""
        if self._control is not None:
            self._control.request_drain(grace_s)

    def stop(self) -> None:
        """End now: running requests are lost to their routers, which place them elsewhere."""
        if self._control is not None:
            self._control.request_stop()

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _main(self) -> None:
        self._control = WorkerControl(asyncio.get_running_loop(), self._ready.set_result)
        await self._serve(self._config, self._control)
