"""Follows the registry: a client for each worker of the roster, and the news for the core. No decisions.

When the registry cannot be asked, everything stays as it is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from common.cluster.protocol import Registration, Registry
from common.tls.identity import Identity
from common.values.ids import RouterId, WorkerRef
from common.values.messages import Role, RouterMessage
from router.core.events import RouterEvent, WorkersListed
from router.core.roster import Roster, StreamState
from router.worker_client import WorkerClient

POLL_INTERVAL_S = 0.5
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
        self._roster = Roster()

    def send(self, worker: WorkerRef, message: RouterMessage) -> None:
        if worker in self._clients:
            self._clients[worker].send(message)

    def drop(self, worker: WorkerRef, reason: str, *, is_final: bool) -> None:
        """End the stream; it is opened again as long as the worker is listed, unless `is_final`."""
        client = self._clients.get(worker)
        if client is None:
            return
        if is_final:
            self._roster.supersede(worker)
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
        registrations = {registration.ref: registration for registration in listed}
        streams = {ref: _state_of(client) for ref, client in self._clients.items()}
        change = self._roster.follow(frozenset(registrations), streams, time.monotonic())
        for ref in change.connect:
            client = WorkerClient(registrations[ref], self._router_id, self._post, self._identity)
            self._clients[ref] = client
            tasks.create_task(self._run_client(client))
        for ref in change.retire:
            self._clients[ref].retire()
        self._post(WorkersListed(change.known, expected))

    async def _run_client(self, client: WorkerClient) -> None:
        try:
            await client.run()
        finally:
            del self._clients[client.registration.ref]


def _state_of(client: WorkerClient) -> StreamState:
    if client.is_connected:
        return StreamState.OPEN
    return StreamState.ENDED if client.has_left else StreamState.BROKEN
