"""A simulated Redis: leases that end, an index, and the states in which it refuses, forgets or is late.

What a worker does about it is as in production: it renews its lease every third of it, and whoever finds with its
lease that something of what it published is missing publishes everything again.
"""

import random
from collections.abc import Callable, Sequence
from enum import StrEnum

from common.cluster.memory import InMemoryIndex
from common.cluster.protocol import Registration
from common.values.ids import BlockHash, WorkerRef
from tests.simkit.virtual_time import VirtualTime

LEASE_S = 1.5
EVICT_S = 0.2

Hashes = Sequence[BlockHash]


class RedisState(StrEnum):
    """read_only: answers from what it has, takes nothing. full: prolongs and removes, takes nothing new. evicting:
    forgets anything at any time. slow: any answer may be late, which its clients take for none."""

    WELL = "well"
    GONE = "gone"
    READ_ONLY = "read_only"
    FULL = "full"
    EVICTING = "evicting"
    SLOW = "slow"


class SimRedis:
    """Owns the leases and the index. `state` may be set at any time."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self.state = RedisState.WELL
        self._time = time
        self._rng = rng
        self._ends_s: dict[WorkerRef, float] = {}
        self._index = InMemoryIndex()
        self._incomplete: set[WorkerRef] = set()  # something that they published is missing
        self._evict()

    # ---- what workers do ----------------------------------------------------------------------------

    def renew(self, registration: Registration, blocks: Callable[[], Hashes]) -> None:
        """Register or prolong; then repair what is missing."""
        ref = registration.ref
        if not self._takes(is_new=ref not in self.leases()):
            return
        if ref not in self._ends_s:
            self._incomplete.add(ref)
        self._ends_s[ref] = self._time.now_s + LEASE_S
        if ref in self._incomplete and self._takes(is_new=True):
            self._index.deregister(ref)
            self._index.register(registration)
            self._index.writer(ref).publish(blocks(), ())
            self._incomplete.discard(ref)

    def publish(self, ref: WorkerRef, stored: Hashes, evicted: Hashes) -> None:
        if ref in self.leases() and self._takes(is_new=bool(stored)):
            self._index.writer(ref).publish(stored, evicted)
        else:
            self._incomplete.add(ref)

    # ---- what routers ask ---------------------------------------------------------------------------

    def live(self) -> frozenset[WorkerRef] | None:
        """Those with a lease; None when there is no answer."""
        return self.leases() if self._answers() else None

    def known_prefix(self, hashes: Hashes, workers: Sequence[WorkerRef]) -> list[tuple[WorkerRef, int]]:
        self.leases()
        return list(self._index.known_prefix(hashes, workers).items()) if self._answers() else []

    def leases(self) -> frozenset[WorkerRef]:
        """As they stand, whoever could ask; those that have ended are forgotten with their blocks."""
        for ref in [ref for ref, end_s in self._ends_s.items() if end_s <= self._time.now_s]:
            self._forget(ref)
        return frozenset(self._ends_s)

    # ---- what happens to it -------------------------------------------------------------------------

    def wipe(self) -> bool:
        """Everything is gone. False when there was nothing."""
        found = self.leases()
        for ref in found:
            self._forget(ref)
        return bool(found)

    def lie(self, ref: WorkerRef, hashes: Hashes) -> bool:
        """The worker is said to hold these blocks."""
        self._index.writer(ref).publish(hashes, ())
        return bool(hashes)

    def _forget(self, ref: WorkerRef) -> None:
        del self._ends_s[ref]
        self._index.deregister(ref)

    def _evict(self) -> None:
        if self.state is RedisState.EVICTING:
            for ref in sorted(self.leases()):
                if self._rng.random() < 0.5:
                    self._forget(ref)
        self._time.after(EVICT_S, self._evict)

    def _takes(self, *, is_new: bool) -> bool:
        """Whether a write succeeds; the writer of a late one does not know, and says everything again."""
        match self.state:
            case RedisState.GONE | RedisState.READ_ONLY:
                return False
            case RedisState.FULL:
                return not is_new
        return self._answers()

    def _answers(self) -> bool:
        match self.state:
            case RedisState.GONE:
                return False
            case RedisState.SLOW:
                return self._rng.random() < 0.5
        return True
