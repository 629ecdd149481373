"""A worker's lease and its part of the index, as one thing. See `keys.py` for what is stored."""

import asyncio
from collections.abc import Callable, Sequence

from common.cluster.prefix_index.writer import RedisIndexWriter
from common.cluster.protocol import Registration
from common.cluster.registry import Lease
from common.values.ids import BlockHash


class WorkerPresence:
    """All that a worker says to Redis: its lease and its blocks. Without a `redis_url` it says nothing.

    `snapshot` returns the hashes of all blocks the worker caches; it is called in the event loop, after a gap.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        registration: Registration,
        *,
        lease_s: float,
        snapshot: Callable[[], Sequence[BlockHash]],
    ) -> None:
        self._lease: Lease | None = None
        self._writer: RedisIndexWriter | None = None
        self._task: asyncio.Task[None] | None = None
        if redis_url:
            self._lease = Lease(redis_url, namespace, registration, lease_s)
            self._writer = RedisIndexWriter(redis_url, namespace, registration.ref, lease_s, snapshot)

    def publish(self, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]) -> None:
        """Queue a change of the worker's blocks; returns at once and never raises."""
        if self._writer is not None:
            self._writer.publish(stored, evicted)

    async def start(self) -> None:
        """Register and keep the lease and the index fresh until `close`. Works without Redis, then catches up."""
        if self._lease is not None:
            await self._lease.renew()
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Give the lease back at once: routers stop choosing this worker within their next look."""
        if self._lease is None or self._writer is None:
            return
        self._lease.stop()
        self._writer.stop()
        if self._task is not None:
            await self._task
        await self._lease.deregister()
        await self._lease.close()
        await self._writer.close()

    async def _run(self) -> None:
        if self._lease is None or self._writer is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease.run())
            tasks.create_task(self._writer.run())
