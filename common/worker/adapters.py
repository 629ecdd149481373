"""Holds messages back until the adapter that their work wants is in memory; makes room by giving up the one that
nobody has wanted for longest.

Owns which adapters are in memory. One that live work wants, or that a step still computes with, stays.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.checkpoint import CheckpointError
from common.engine.executor.adapters import Adapters
from common.telemetry.logs import get_logger
from common.telemetry.metrics import Metrics
from common.values.ids import RouterId
from common.values.messages import Cancel, Prefill, Refused, Reserve
from common.values.request import Adapter

Message = Reserve | Prefill | Cancel
Post = Callable[[RouterId, Message], None]
Refuse = Callable[[RouterId, Refused], None]
# A client hears no more: what is wrong with which files stands in the worker's log.
_CANNOT_LOAD = "the adapter cannot be loaded; the log of the worker says why"


class AdapterDoor:
    """Everything in the event loop's thread; only the reading of files is not."""

    def __init__(
        self,
        adapters: Adapters,
        max_loras: int,
        in_use: Callable[[], set[str]],
        post: Post,
        refuse: Refuse,
        metrics: Metrics,
    ) -> None:
        """`in_use` gives the digests that live work wants. `max_loras` = 0: none is ever taken."""
        self._adapters = adapters
        self._max_loras = max_loras
        self._in_use = in_use
        self._post = post
        self._refuse = refuse
        self._metrics = metrics
        self._held: dict[str, list[tuple[RouterId, Message]]] = {}  # by the digest that is being loaded, in order
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, router_id: RouterId, message: Message) -> None:
        """Pass it on, now or when it can be done; refuse work whose adapter cannot be had."""
        if isinstance(message, Cancel):
            self._cancel(router_id, message)
            return
        adapter = message.work.adapter
        if not adapter or self._adapters.use(adapter.digest):
            self._post(router_id, message)
        elif adapter.digest in self._held:
            self._held[adapter.digest].append((router_id, message))
        elif self._max_loras == 0:
            self._refuse(router_id, _refused(message, "adapters need tensor_parallel_size 1", is_retryable=False))
        elif not self._make_room():
            problem = f"no room for an adapter: all {self._max_loras} (max_loras) are in use"
            self._refuse(router_id, _refused(message, problem, is_retryable=True))
        else:
            self._held[adapter.digest] = [(router_id, message)]
            self._begin(self._load(adapter))

    def on_router_lost(self, router_id: RouterId) -> None:
        """What it asked for is not done."""
        for digest, held in self._held.items():
            self._held[digest] = [each for each in held if each[0] != router_id]

    def close(self) -> None:
        """Nothing held is passed on any more."""
        for task in self._tasks:
            task.cancel()

    def _cancel(self, router_id: RouterId, message: Cancel) -> None:
        """Behind the work that it is about."""
        for held in self._held.values():
            if any(not isinstance(other, Cancel) and other.work.attempt_id == message.attempt_id for _, other in held):
                held.append((router_id, message))
                return
        self._post(router_id, message)

    def _make_room(self) -> bool:
        num_left = self._max_loras - len(self._held)
        in_use = self._in_use()
        for digest in self._adapters.digests:  # that was used longest ago first
            if len(self._adapters.digests) < num_left:
                break
            if digest not in in_use:
                self._adapters.discard(digest)
        return len(self._adapters.digests) < num_left

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, adapter: Adapter) -> None:
        try:
            loaded = await asyncio.to_thread(self._adapters.load, adapter)
        except Exception as error:  # the edge of files and devices: what waits here is answered whatever happens
            # Of others the type alone: a message of torch's may hold tensor contents.
            is_bad = isinstance(error, CheckpointError)
            self._metrics.inc("pdserve_adapter_loads", outcome="failed")
            reason = str(error) if is_bad else type(error).__name__
            get_logger().error("adapter_refused", path=adapter.path, reason=reason)
            for router_id, message in self._held.pop(adapter.digest):
                if not isinstance(message, Cancel):
                    self._refuse(router_id, _refused(message, _CANNOT_LOAD, is_retryable=not is_bad))
            return
        self._adapters.add(adapter.digest, loaded)
        self._metrics.inc("pdserve_adapter_loads", outcome="loaded")
        self._metrics.set("pdserve_adapters_loaded", len(self._adapters.digests))
        get_logger().info("adapter_loaded", path=adapter.path, digest=adapter.digest[:12])
        for router_id, message in self._held.pop(adapter.digest):
            self._post(router_id, message)


def _refused(message: Reserve | Prefill, reason: str, *, is_retryable: bool) -> Refused:
    prefill_try = message.prefill_try if isinstance(message, Prefill) else None
    return Refused(message.work.attempt_id, reason, is_retryable, prefill_try)
