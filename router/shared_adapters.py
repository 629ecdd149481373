"""Adapters that are loaded and unloaded while the routers of a cluster serve: what one is told, all do.

Workers need not be told: work names its adapter, and they read it when it first comes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.cluster.adapters import AdapterRecord, AdapterStore
from common.cluster.redis import wait_for_event
from common.values.request import Adapter
from router.request.adapters import ServedAdapter, ServedAdapters

INTERVAL_S = 1.0


class SharedAdapters:
    """`run` it while the router serves. All in one event loop."""

    def __init__(self, store: AdapterStore, adapters: ServedAdapters) -> None:
        self._store = store
        self._adapters = adapters
        self._num_changes = 0
        self._num_changing = 0  # changes that Redis has not confirmed
        self._is_closing = asyncio.Event()

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Serve an adapter, here at once and everywhere within a second or so. Raises InvalidRequest."""
        served = await asyncio.to_thread(self._adapters.read, name, path)
        is_new = self._adapters.get(name) is None
        self._adapters.add(served)
        with self._changing():
            try:
                await self._store.put(name, _record(served))
            except BaseException:
                if is_new and self._adapters.get(name) is served:
                    self._adapters.remove(name)
                raise
        return served

    async def unload(self, name: str) -> None:
        """Take no more requests for it; those in flight go on. Raises InvalidRequest."""
        served = self._adapters.get(name)
        self._adapters.remove(name)
        with self._changing():
            try:
                await self._store.remove(name)
            except BaseException:
                if served is not None:
                    self._adapters.add(served)
                raise

    async def run(self) -> None:
        """Follow what other routers are told, until `stop`."""
        while not self._is_closing.is_set():
            await self.follow()
            await wait_for_event(self._is_closing, INTERVAL_S)

    async def follow(self) -> None:
        """One look. Without Redis what is known stays, and is said again to one that has lost it."""
        num_changes = self._num_changes
        found = await self._store.all()
        is_older = self._num_changing or num_changes != self._num_changes  # or may be
        if found is None or is_older:
            return
        served = {name: _served(name, record) for name, record in found.by_name.items()}
        if not found.is_whole:
            lost = {
                each.name: each for each in self._adapters.all if not each.is_configured and each.name not in served
            }
            served |= lost
            await self._store.restore({name: _record(each) for name, each in lost.items()})
            if self._num_changing or num_changes != self._num_changes:
                return
        self._adapters.replace_others(served)

    def stop(self) -> None:
        self._is_closing.set()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is read of Redis meanwhile does not count."""
        self._num_changing += 1
        try:
            yield
        finally:
            self._num_changing -= 1
            self._num_changes += 1


def _record(served: ServedAdapter) -> AdapterRecord:
    return AdapterRecord(served.adapter.digest, served.adapter.path, served.created_s)


def _served(name: str, record: AdapterRecord) -> ServedAdapter:
    return ServedAdapter(name, Adapter(record.digest, record.path), record.created_s)
