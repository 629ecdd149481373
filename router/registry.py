"""Follows the registry: a client for each registered worker, and the news for the core. No decisions about requests.

When the registry cannot be asked, everything stays as it is. When it does not list a worker any more, an open stream
says that the worker lives, and one that broke is opened again for a while: Redis may have lost the key alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from common.cluster.protocol import Registration, Registry
from common.tls.identity import Identity
from common.values.ids import RouterId, WorkerRef
from common.values.messages import Role, RouterMessage
from router.core.events import RouterEvent, WorkersListed
from router.worker_client import WorkerClient

POLL_INTERVAL_S = 0.5
# A worker with neither lease nor stream is tried for so long.
UNLISTED_S = 30.0


# Roles of which a worker is being started or loads.
ExpectedRoles = Callable[[], Awaitable[frozenset[Role]]]


async def _nothing_expected() -> frozenset[Role]:
    return frozenset()


class WorkerDirectory:
    """Owns the clients and their tasks."""

    def __init__(
        self,
        registry: Registry,
        router_id: RouterId,
        post: Callable[[RouterEvent], None],
        identity: Identity,
        expected: ExpectedRoles = _nothing_expected,
    ) -> None:
        self._registry = registry
        self._expected = expected
        self._identity = identity
        self._router_id = router_id
        self._post = post
        self._clients: dict[WorkerRef, WorkerClient] = {}
        self._missing_since_s: dict[WorkerRef, float] = {}  # those without lease and stream
        self._superseded: set[WorkerRef] = set()  # listed still, but a later life has come

    def send(self, worker: WorkerRef, message: RouterMessage) -> None:
        if worker in self._clients:
            self._clients[worker].send(message)

    def drop(self, worker: WorkerRef, reason: str, *, is_final: bool) -> None:
        """End the stream; it is opened again as long as the worker is listed, unless `is_final`."""
        client = self._clients.get(worker)
        if client is None:
            return
        if is_final:
            self._superseded.add(worker)
            client.retire()
        client.drop(reason)

    async def run(self) -> None:
        """Poll until cancelled; raises what a client raises, which is a bug of ours."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                listed = await self._registry.live_workers()
                if listed is not None:
                    self._follow(listed, await self._expected(), tasks)
                await asyncio.sleep(POLL_INTERVAL_S)

    def _follow(self, listed: list[Registration], expected: frozenset[Role], tasks: asyncio.TaskGroup) -> None:
        refs = frozenset(registration.ref for registration in listed)
        self._superseded &= refs
        for registration in listed:
            if registration.ref not in self._clients and registration.ref not in self._superseded:
                client = WorkerClient(registration, self._router_id, self._post, self._identity)
                self._clients[registration.ref] = client
                tasks.create_task(self._run_client(client))
        self._retire_missing(refs, time.monotonic())
        self._post(WorkersListed(refs | self._clients.keys(), expected))

    def _retire_missing(self, listed: frozenset[WorkerRef], now_s: float) -> None:
        missing = {ref for ref, client in self._clients.items() if ref not in listed and not client.is_connected}
        self._missing_since_s = {ref: self._missing_since_s.get(ref, now_s) for ref in missing}
        for ref, since_s in self._missing_since_s.items():
            if self._clients[ref].has_left or now_s - since_s >= UNLISTED_S:
                self._clients[ref].retire()

    async def _run_client(self, client: WorkerClient) -> None:
        try:
            await client.run()
        finally:
            del self._clients[client.registration.ref]
