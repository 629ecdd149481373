"""What workers publish and routers read. Implemented in memory (tests, one process) and on Redis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.values.ids import BlockHash, WorkerRef
from common.values.messages import Role


@dataclass(frozen=True, slots=True)
class Registration:
    """A live worker as the registry knows it; everything else the worker says itself on its stream."""

    ref: WorkerRef
    role: Role
    address: str


class PrefixIndexReader(Protocol):
    def known_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int] | None:
        """The answer of `longest_prefix` where it is known without asking Redis, else None."""
        ...

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """Leading blocks of `hashes` that each of `workers` holds; a worker without any may be absent.

        Never raises and never takes long (50 ms at most): when the index is away it answers {}.
        """
        ...


class PrefixIndexWriter(Protocol):
    """One worker's side. Calls are ordered; the writer numbers the batches and resyncs after a gap by itself."""

    def publish(self, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]) -> None:
        """Queue a batch; returns at once and never raises. A full queue turns into a resync later."""
        ...


class Registry(Protocol):
    """Leased registrations: a worker that stops renewing disappears by itself."""

    @property
    def problem(self) -> str:
        """Why the last look found nothing; empty = it was answered."""
        ...

    async def live_workers(self) -> list[Registration] | None:
        """All workers with a lease, or None when the registry cannot be asked (then keep what you know)."""
        ...
