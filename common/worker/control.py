"""What the outside asks of a running worker, from any thread: to drain, to stop, to take another role."""

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from common.values.config import WorkerConfig
from common.values.errors import PdserveError


class RoleChangeFailed(PdserveError):
    """The worker does not come to serve the other role: it is ending, or busy with another change."""


@dataclass(slots=True, eq=False)
class RoleChange:
    """Serve as `config` says once the present role has drained. `done`: the new description, when ready."""

    config: WorkerConfig
    grace_s: float
    asked_s: float = field(default_factory=time.monotonic)
    done: "Future[dict[str, Any]]" = field(default_factory=Future)


class WorkerControl:
    """Requests to a running worker. Those that end it win over a change of its role."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ready: Callable[[dict[str, Any]], None]) -> None:
        self._loop = loop
        self._on_ready = on_ready
        self._drain_asked = asyncio.Event()
        self._drain_grace_s = 0.0
        self._change_asked = asyncio.Event()
        self._change: RoleChange | None = None
        self._has_ended = False
        self.stopped = asyncio.Event()

    # ---- from any thread ----------------------------------------------------------------------------

    def request_drain(self, grace_s: float) -> None:
        """Ignored once the worker has ended."""
        self._in_loop(self._set_drain, grace_s)

    def request_stop(self) -> None:
        """Ignored once the worker has ended."""
        self._in_loop(self.stopped.set)

    def request_role(self, config: WorkerConfig, grace_s: float) -> "Future[dict[str, Any]]":
        """Drain, then serve the role of `config` around the same weights. Answers the description, or RoleChangeFailed.

        Whether the weights fit `config` is for the caller to check (`role_change.check_role_change`).
        """
        change = RoleChange(config, grace_s)
        if not self._in_loop(self._set_change, change):
            change.done.set_exception(RoleChangeFailed("the worker has ended"))
        return change.done

    def handle_signals(self, grace_s: float) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, grace_s)

    # ---- from the worker, in its loop ---------------------------------------------------------------

    def report_ready(self, description: dict[str, Any]) -> None:
        self._on_ready(description)

    def report_changed(self, description: dict[str, Any]) -> None:
        """The role that was asked for is ready."""
        assert self._change is not None
        change, self._change = self._change, None
        self._change_asked.clear()
        change.done.set_result(description)

    def report_ended(self) -> None:
        """Nothing will be served any more: what waits for another role hears it."""
        self._has_ended = True
        if self._change is not None:
            self._change.done.set_exception(RoleChangeFailed("the worker ended before it took the other role"))
            self._change = None

    async def until_drain_is_asked(self) -> float:
        """The grace of a worker that is to end."""
        await self._drain_asked.wait()
        return self._drain_grace_s

    async def until_change_is_asked(self) -> float:
        """The grace of a role that is to make place for another."""
        await self._change_asked.wait()
        return self._change.grace_s if self._change is not None else 0.0

    def next_role(self) -> RoleChange | None:
        """What to do when a role has ended: the change to make, or None when the worker ends."""
        return None if self._is_ending else self._change

    # ---- private ------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._drain_asked.is_set() or self.stopped.is_set() or self._has_ended

    def _in_loop(self, action: Callable[..., None], *arguments: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _on_signal(self, grace_s: float) -> None:
        if self._drain_asked.is_set():
            self.stopped.set()
        self._set_drain(grace_s)

    def _set_drain(self, grace_s: float) -> None:
        if not self._drain_asked.is_set():
            self._drain_grace_s = grace_s
            self._drain_asked.set()

    def _set_change(self, change: RoleChange) -> None:
        if self._is_ending:
            change.done.set_exception(RoleChangeFailed("the worker is ending"))
        elif self._change is not None:
            change.done.set_exception(RoleChangeFailed("the worker is changing its role already"))
        else:
            self._change = change
            self._change_asked.set()
