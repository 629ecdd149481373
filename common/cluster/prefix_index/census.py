"""How much of the prefix index is where: blocks per worker, and what share of them others hold too. For people.

What two workers share is estimated from a sample of one's blocks, so that a census costs little however large the
index is. No block hash leaves this module.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio.client import Pipeline

from common.cluster.keys import Keys
from common.cluster.redis import REDIS_ERRORS, connect
from common.values.ids import WorkerRef

TIMEOUT_S = 0.2
SAMPLE_SIZE = 64
# Every pair is asked for; beyond this many workers only the counts are.
MAX_COMPARED = 12


@dataclass(frozen=True, slots=True)
class WorkerCensus:
    """One worker's part of the index. Shares are of its own blocks; None = not compared.

    `most_shared_with` is the worker that holds the largest share of them too, "" when none holds any.
    """

    worker_id: str
    num_blocks: int
    share_only_here: float | None = None
    most_shared_with: str = ""
    most_shared: float = 0.0


class IndexCensus:
    """One process's access. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._keys = Keys(namespace)

    async def take(self, workers: Sequence[WorkerRef]) -> tuple[WorkerCensus, ...] | None:
        """In the order of `workers`; None when Redis can't be asked."""
        if not workers:
            return ()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                counts = await self._counts(workers)
                shared = await self._shared(workers) if len(workers) <= MAX_COMPARED else [None] * len(workers)
        except REDIS_ERRORS:
            return None
        return tuple(
            _census(ref, count, held, workers) for ref, count, held in zip(workers, counts, shared, strict=True)
        )

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _counts(self, workers: Sequence[WorkerRef]) -> list[int]:
        async with self._pipeline() as pipe:
            for ref in workers:
                pipe.scard(self._keys.members(ref))
            return [int(count) for count in await pipe.execute()]

    async def _shared(self, workers: Sequence[WorkerRef]) -> list[list[list[int]] | None]:
        """Per worker, per other worker: which blocks of a sample that one holds. None for an empty sample."""
        async with self._pipeline() as pipe:
            for ref in workers:
                pipe.srandmember(self._keys.members(ref), SAMPLE_SIZE)
            samples = await pipe.execute()
        async with self._pipeline() as pipe:
            for ref, sample in zip(workers, samples, strict=True):
                for other in workers:
                    if sample and other != ref:
                        pipe.smismember(self._keys.members(other), sample)
            answers = iter(await pipe.execute())
        return [[next(answers) for _ in workers[1:]] if sample else None for sample in samples]

    def _pipeline(self) -> Pipeline:
        return self._redis.pipeline(transaction=False)


def _census(
    ref: WorkerRef, num_blocks: int, held: list[list[int]] | None, workers: Sequence[WorkerRef]
) -> WorkerCensus:
    if held is None:
        return WorkerCensus(ref.worker_id, num_blocks)
    others = [other for other in workers if other != ref]
    shares = {other: sum(row) / len(row) for other, row in zip(others, held, strict=True)}
    is_elsewhere = [any(column) for column in zip(*held, strict=True)]
    only_here = 1.0 - sum(is_elsewhere) / len(is_elsewhere) if is_elsewhere else 1.0
    best = max(shares, key=lambda other: shares[other], default=None)
    if best is None or shares[best] == 0.0:
        return WorkerCensus(ref.worker_id, num_blocks, only_here)
    return WorkerCensus(ref.worker_id, num_blocks, only_here, best.worker_id, shares[best])
