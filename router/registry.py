"""Follows the registry: a client for each registered worker, and the news for the core. No decisions about requests.

When the registry cannot be asked, everything stays as it is: streams, not leases, say who lives.
"""

import asyncio
from collections.abc import Callable

from common.cluster.protocol import Registration, Registry
from common.tls.identity import Identity
from common.values.ids import RouterId, WorkerRef
from common.values.messages import RouterMessage
from router.core.events import RouterEvent, WorkersListed
from router.worker_client import WorkerClient

POLL_INTERVAL_S = 0.5


class WorkerDirectory:
    """Owns the clients and their tasks."""

    def __init__(
        self, registry: Registry, router_id: RouterId, post: Callable[[RouterEvent], None], identity: Identity
    ) -> None:
        self._registry = registry
        self._identity = identity
        self._router_id = router_id
        self._post = post
        self._clients: dict[WorkerRef, WorkerClient] = {}
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
                    self._follow(listed, tasks)
                await asyncio.sleep(POLL_INTERVAL_S)

    def _follow(self, listed: list[Registration], tasks: asyncio.TaskGroup) -> None:
        refs = frozenset(registration.ref for registration in listed)
        self._superseded &= refs
        for registration in listed:
            if registration.ref not in self._clients and registration.ref not in self._superseded:
                client = WorkerClient(registration, self._router_id, self._post, self._identity)
                self._clients[registration.ref] = client
                tasks.create_task(self._run_client(client))
        for ref, client in self._clients.items():
            if ref not in refs and not client.is_connected:
                client.retire()
        self._post(WorkersListed(refs))

    async def _run_client(self, client: WorkerClient) -> None:
        try:
            await client.run()
        finally:
            del self._clients[client.registration.ref]
