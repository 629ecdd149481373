"""The router's side of the index: who holds how much of a prompt. Bounded in time, silent when Redis is away."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from common.cluster.keys import MEMBER_BYTES, Keys, pack
from common.cluster.prefix_index.breaker import CircuitBreaker
from common.cluster.redis import REDIS_ERRORS, connect
from common.cluster.scripts import LOOKUP
from common.values.ids import BlockHash, WorkerRef

BUDGET_S = 0.05


@dataclass(slots=True)
class ReaderCounts:
    """How look-ups ended, since the start."""

    num_answered: int = 0
    num_failed: int = 0  # Redis away, slow or refusing
    num_skipped: int = 0  # not asked: the breaker was open
    num_invalid: int = 0  # answers that cannot be true: a poisoned key or another call's reply


class RedisIndexReader:
    """Asks Redis with one script call per prompt. Owns its connections; close it."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        budget_s: float = BUDGET_S,
        clock: Callable[[], float] = time.monotonic,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = ReaderCounts()
        self._on_failed = on_failed
        self._redis = connect(redis_url, budget_s, max_connections=16)
        self._lookup = self._redis.register_script(LOOKUP)
        self._keys = Keys(namespace)
        self._budget_s = budget_s
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._echo = itertools.count()

    @property
    def is_degraded(self) -> bool:
        """True while Redis is not asked because it failed repeatedly."""
        return self._breaker.is_open

    def known_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> None:
        """Nothing is known here."""

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """Leading blocks of `hashes` per worker, those with at least one; {} when Redis can't say in time."""
        if not hashes or not workers:
            return {}
        if not self._breaker.allows(self._clock()):
            self.counts.num_skipped += 1
            return {}
        try:
            async with asyncio.timeout(self._budget_s):
                depths = await self._ask(hashes, workers)
        except REDIS_ERRORS:
            self.counts.num_failed += 1
            self._on_failed()
            self._breaker.failed(self._clock())
            return {}
        self._breaker.succeeded()
        self.counts.num_answered += 1
        return self._checked(depths, workers, len(hashes))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> list[object]:
        echo = b"%d" % next(self._echo)
        keys = [key for ref in workers for key in (self._keys.lease(ref), self._keys.members(ref))]
        answer = await self._lookup(keys=keys, args=[MEMBER_BYTES, pack(hashes), echo])
        if not isinstance(answer, list) or len(answer) != len(workers) + 1 or answer[0] != echo:
            # A reply that belongs to another call: the connections can't be trusted any more (CVE-2023-28858).
            self.counts.num_invalid += 1
            await self._redis.connection_pool.disconnect()
            raise RedisError("reply does not carry the echo of this call")
        return answer[1:]

    def _checked(self, depths: list[object], workers: Sequence[WorkerRef], num_blocks: int) -> dict[WorkerRef, int]:
        found = {}
        for ref, depth in zip(workers, depths, strict=True):
            if not isinstance(depth, int) or not -1 <= depth <= num_blocks:
                self.counts.num_invalid += 1
            elif depth > 0:
                found[ref] = depth
        return found
