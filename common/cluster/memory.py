"""The index and the registry in memory: for tests, simulations and clusters of one process. No IO."""

from collections.abc import Sequence

from common.cluster.protocol import Registration
from common.values.ids import BlockHash, WorkerRef


class InMemoryIndex:
    """Blocks per worker. Reader and registry in one; `writer(ref)` is a worker's side."""

    problem = ""

    def __init__(self) -> None:
        self._registrations: dict[WorkerRef, Registration] = {}
        self._hashes: dict[WorkerRef, set[BlockHash]] = {}

    def register(self, registration: Registration) -> None:
        self._registrations[registration.ref] = registration

    def deregister(self, ref: WorkerRef) -> None:
        """Forget a worker and all that it stored."""
        self._registrations.pop(ref, None)
        self._hashes.pop(ref, None)

    def writer(self, ref: WorkerRef) -> "InMemoryWriter":
        return InMemoryWriter(self._hashes, ref)

    async def live_workers(self) -> list[Registration] | None:
        return list(self._registrations.values())

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """Leading blocks of `hashes` per registered worker, those with at least one."""
        return self.known_prefix(hashes, workers)

    def known_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """The same at once."""
        live = [ref for ref in workers if ref in self._registrations]
        depths = {ref: _depth(hashes, self._hashes.get(ref, set())) for ref in live}
        return {ref: depth for ref, depth in depths.items() if depth > 0}


class InMemoryWriter:
    """One worker's side; every batch is applied at once."""

    def __init__(self, hashes: dict[WorkerRef, set[BlockHash]], ref: WorkerRef) -> None:
        self._hashes = hashes
        self._ref = ref

    def publish(self, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]) -> None:
        held = self._hashes.setdefault(self._ref, set())
        held.update(stored)
        held.difference_update(evicted)


def _depth(hashes: Sequence[BlockHash], held: set[BlockHash]) -> int:
    depth = 0
    while depth < len(hashes) and hashes[depth] in held:
        depth += 1
    return depth
