"""Attempts that wait for a worker: their order, and what can be done for them now. Pure: no IO.

Owns the order, not the attempts: `steps` says what to do, and the caller moves the attempts.
"""

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from common.cores.fair_shares import FairShares
from common.values.ids import AttemptId
from router.core.placement import Placer
from router.core.policy import RoutingDecision
from router.core.pool import WorkerPool
from router.core.request_state import AttemptPhase, Request, RouterAttempt
from router.core.router_limits import RouterLimits
from router.core.workers import Worker

_Entry = tuple[int, int, int, AttemptId]  # priority, arrival, attempt: unique by then


class AttemptQueue:
    """Attempts in fair turns between tenants; within a tenant by priority, then arrival of their request."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._lines: dict[str, list[_Entry]] = {}
        self._items: dict[AttemptId, tuple[_Entry, Request, RouterAttempt]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[Request, RouterAttempt]]:
        """Adding and removing meanwhile is allowed."""
        for _, _, _, attempt_id in self._shares.in_turn({name: line.copy() for name, line in self._lines.items()}):
            if (item := self._items.get(attempt_id)) is not None:
                yield item[1:]

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._items

    def add(self, request: Request, attempt: RouterAttempt) -> None:
        attempt_id = attempt.attempt_id
        assert attempt_id not in self._items, f"{attempt_id} waits already"
        entry = (request.spec.priority, request.ordinal, attempt_id.attempt, attempt_id)
        insort(self._lines.setdefault(request.spec.tenant, []), entry)
        self._items[attempt_id] = entry, request, attempt

    def discard(self, attempt_id: AttemptId) -> None:
        if (item := self._items.pop(attempt_id, None)) is not None:
            entry, tenant = item[0], item[1].spec.tenant
            self._lines[tenant].remove(entry)
            if not self._lines[tenant]:
                del self._lines[tenant]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Ask a decode worker to take an attempt. It may prefill up to `local_max` uncached tokens by itself."""

    request: Request
    attempt: RouterAttempt
    worker: Worker
    local_max: int
    decisions: tuple[RoutingDecision, ...]


@dataclass(frozen=True, slots=True)
class PrefillStart:
    """Send a granted attempt to a prefill worker."""

    request: Request
    attempt: RouterAttempt
    worker: Worker
    decision: RoutingDecision


@dataclass(frozen=True, slots=True)
class StillWaits:
    """No worker takes the attempt now. `has_pair`: those that it needs are there, if perhaps full."""

    attempt: RouterAttempt
    has_pair: bool


Step = Reservation | PrefillStart | StillWaits


class Waiting:
    """Who waits, for a decode worker or, granted by one, for a prefill worker."""

    def __init__(self, pool: WorkerPool, limits: RouterLimits) -> None:
        self._pool = pool
        self.shares = FairShares()
        self.queued = AttemptQueue(self.shares)
        self.granted = AttemptQueue(self.shares)
        self._placer = Placer(pool, limits.local_prefill_max_tokens, limits.balance_prefill_max_tokens)
        self._balance_max = limits.balance_prefill_max_tokens
        self.is_awake = False  # something has changed that may let an attempt go on

    def wake(self) -> None:
        self.is_awake = True

    def add(self, request: Request, attempt: RouterAttempt) -> None:
        (self.queued if attempt.phase is AttemptPhase.QUEUED else self.granted).add(request, attempt)
        self.wake()

    def discard(self, attempt: RouterAttempt) -> None:
        self.queued.discard(attempt.attempt_id)
        self.granted.discard(attempt.attempt_id)

    def has_pair(self, request: Request, attempt: RouterAttempt) -> bool:
        return self._placer.has_pair(request, attempt)

    def check_invariants(self, attempts: Sequence[RouterAttempt]) -> None:
        """Of all live attempts exactly those wait whose phase says so; raises AssertionError."""
        for queue, phase in ((self.queued, AttemptPhase.QUEUED), (self.granted, AttemptPhase.GRANTED)):
            waiting = [attempt.attempt_id for attempt in attempts if attempt.phase is phase]
            assert len(queue) == len(waiting), f"an attempt waits that is not {phase}"
            assert all(attempt_id in queue for attempt_id in waiting)

    def steps(self, tenants: Collection[str], now_s: float) -> Iterator[Step]:
        """What can be done, in order; each is to be done before the next is asked for. `tenants` have live requests.

        A request that lacks room holds back those behind it, unless it waits for a worker that it named, or for an
        adapter's place.
        """
        self.is_awake = False
        self.shares.begin(tenants)  # before any turn is taken
        for request, attempt in self.granted:
            yield self._prefill_step(request, attempt, now_s)
        is_blocked = False
        for request, attempt in self.queued:
            is_pinned = bool(request.spec.decode_worker_id or request.spec.prefill_worker_id)
            if is_blocked and not is_pinned:
                continue
            step = self._decode_step(request, attempt, now_s)
            is_apart = is_pinned or self._pool.is_adapter_paused(request.spec.adapter.digest)
            is_blocked |= isinstance(step, StillWaits) and step.has_pair and not is_apart
            yield step

    def _prefill_step(self, request: Request, attempt: RouterAttempt, now_s: float) -> Step:
        decision = self._placer.choose_prefill(request, attempt, now_s)
        if decision.chosen is None:
            return StillWaits(attempt, self.has_pair(request, attempt))
        return PrefillStart(request, attempt, self._placer.take(decision, now_s), decision)

    def _decode_step(self, request: Request, attempt: RouterAttempt, now_s: float) -> Step:
        decision = self._placer.choose_decode(request, attempt, now_s)
        if decision.chosen is None:
            return StillWaits(attempt, self.has_pair(request, attempt))
        worker = self._placer.take(decision, now_s)
        prefiller = self._placer.choose_prefiller(request, attempt, worker, now_s)
        if prefiller is None:
            return Reservation(request, attempt, worker, self._placer.local_max(request), (decision,))
        is_here = prefiller.chosen == len(prefiller.candidates) - 1
        local_max = self._balance_max if is_here else self._placer.local_max(request)
        return Reservation(request, attempt, worker, local_max, (decision, prefiller))
