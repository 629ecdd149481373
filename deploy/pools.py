"""Decides which workers to start, drain and replace so that each pool has the size it should have. Pure: no IO.

One member is one life of a worker. Its phases:

    STARTING -ready-> READY -too many-> DRAINING -grace over-> KILLED
        \\--too many or too slow-------------------------------^
    any -ended-> gone; the pool is then filled up again

A member that ends by itself counts as a crash: the first is replaced at once, then the pool waits 1, 2, 4 ... 30 s,
until a member has been ready for a while. A READY member that ends normally was drained by somebody and is replaced.
The youngest leave first: the oldest have the warmest caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.messages import Role

START_LIMIT_S = 600.0
KILL_MARGIN_S = 5.0
STABLE_AFTER_S = 30.0
MAX_BACKOFF_S = 30.0


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLED = "killed"


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizeSet:
    """Somebody wants the pool to have so many workers."""

    role: Role
    replicas: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A controller begins: the sizes wanted, and (role, worker_id) of workers that an earlier one left running."""

    sizes: tuple[tuple[Role, int], ...]
    found: tuple[tuple[Role, str], ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The process is gone. `reason` is empty when it ended normally, after a drain."""

    worker_id: str
    reason: str


PoolEvent = Begun | SizeSet | WorkerReady | WorkerEnded


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Ends in WorkerReady and later WorkerEnded, or in WorkerEnded alone."""

    role: Role
    worker_id: str


@dataclass(frozen=True, slots=True)
class DrainWorker:
    worker_id: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class KillWorker:
    worker_id: str


PoolEffect = StartWorker | DrainWorker | KillWorker


# ---- state ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Member:
    """One worker of a pool. `deadline_s`: when it is killed unless it gets on. `is_found`: it may serve already."""

    worker_id: str
    role: Role
    birth: int
    phase: Phase
    since_s: float
    deadline_s: float | None
    is_found: bool = False

    def enter(self, phase: Phase, now_s: float, deadline_s: float | None = None) -> None:
        self.phase, self.since_s, self.deadline_s = phase, now_s, deadline_s


@dataclass(slots=True)
class Pool:
    """What is wanted of one role, and how its crashes go."""

    replicas: int = 0
    num_crashes: int = 0
    not_before_s: float = 0.0
    last_failure: str = ""

    def note_crash(self, now_s: float, reason: str) -> None:
        self.num_crashes += 1
        self.last_failure = reason
        if self.num_crashes > 1:
            self.not_before_s = now_s + min(MAX_BACKOFF_S, 2.0 ** (self.num_crashes - 2))


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as an operator sees it. `retry_in_s` > 0: a crash loop is being slowed down."""

    role: Role
    desired: int
    starting: int
    ready: int
    draining: int
    num_crashes: int
    last_failure: str
    retry_in_s: float


class PoolCore:
    """Owns the desired sizes and the members of both pools."""

    def __init__(self, drain_grace_s: float, start_limit_s: float = START_LIMIT_S) -> None:
        self._drain_grace_s = drain_grace_s
        self._start_limit_s = start_limit_s
        self._pools = {role: Pool() for role in Role}
        self._members: dict[str, Member] = {}
        self._num_births = 0

    @property
    def num_members(self) -> int:
        """Workers of any phase: 0 = every process is gone."""
        return len(self._members)

    def desired(self) -> dict[str, int]:
        return {role.value: pool.replicas for role, pool in self._pools.items()}

    def status(self, now_s: float) -> list[PoolStatus]:
        return [self._status(role, now_s) for role in Role]

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        """Take in what happened; answers what to do about it."""
        match event:
            case Begun(sizes, found):
                self._begin(sizes, found, now_s)
            case SizeSet(role, replicas):
                self._pools[role].replicas = replicas
            case WorkerReady(worker_id):
                self._on_ready(worker_id, now_s)
            case WorkerEnded(worker_id, reason):
                self._on_ended(worker_id, reason, now_s)
        return self._reconcile(now_s)

    def handle_deadline(self, now_s: float) -> list[PoolEffect]:
        """Kill what is overdue; start what had to wait after a crash."""
        late = [member for member in self._members.values() if member.deadline_s is not None]
        effects: list[PoolEffect] = []
        for member in late:
            if member.deadline_s is not None and member.deadline_s <= now_s:
                effects += self._kill(member, now_s)
        return effects + self._reconcile(now_s)

    def next_deadline_s(self) -> float | None:
        deadlines = [member.deadline_s for member in self._members.values() if member.deadline_s is not None]
        deadlines += [pool.not_before_s for role, pool in self._pools.items() if self._num_missing(role) > 0]
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        for role, pool in self._pools.items():
            assert pool.replicas >= 0
            assert len(self._staying(role)) <= pool.replicas
        for worker_id, member in self._members.items():
            assert member.worker_id == worker_id
            assert (member.deadline_s is None) == (member.phase in (Phase.READY, Phase.KILLED))

    def _begin(self, sizes: Sequence[tuple[Role, int]], found: Sequence[tuple[Role, str]], now_s: float) -> None:
        for role, replicas in sizes:
            self._pools[role].replicas = replicas
        for role, worker_id in found:
            self._add(role, worker_id, now_s, is_found=True)

    def _on_ready(self, worker_id: str, now_s: float) -> None:
        member = self._members[worker_id]
        if member.phase is Phase.STARTING:
            member.enter(Phase.READY, now_s)

    def _on_ended(self, worker_id: str, reason: str, now_s: float) -> None:
        member = self._members.pop(worker_id)
        pool = self._pools[member.role]
        if member.phase is Phase.READY and now_s - member.since_s >= STABLE_AFTER_S:
            pool.num_crashes = 0
        if member.phase in (Phase.STARTING, Phase.READY) and reason:
            pool.note_crash(now_s, f"{worker_id}: {reason}")

    def _reconcile(self, now_s: float) -> list[PoolEffect]:
        effects: list[PoolEffect] = []
        for role, pool in self._pools.items():
            if now_s >= pool.not_before_s:
                effects += [self._start(role, now_s) for _ in range(self._num_missing(role))]
            num_surplus = max(0, -self._num_missing(role))
            for member in self._staying(role)[:num_surplus]:
                effects += self._remove(member, now_s)
        return effects

    def _start(self, role: Role, now_s: float) -> PoolEffect:
        worker_id = self._free_id(role)
        self._add(role, worker_id, now_s, is_found=False)
        return StartWorker(role, worker_id)

    def _add(self, role: Role, worker_id: str, now_s: float, *, is_found: bool) -> None:
        self._num_births += 1
        deadline_s = now_s + self._start_limit_s
        self._members[worker_id] = Member(
            worker_id, role, self._num_births, Phase.STARTING, now_s, deadline_s, is_found
        )

    def _remove(self, member: Member, now_s: float) -> Sequence[PoolEffect]:
        if member.phase is Phase.STARTING and not member.is_found:
            return self._kill(member, now_s)  # it has served nobody
        member.enter(Phase.DRAINING, now_s, now_s + self._drain_grace_s + KILL_MARGIN_S)
        return [DrainWorker(member.worker_id, self._drain_grace_s)]

    def _kill(self, member: Member, now_s: float) -> Sequence[PoolEffect]:
        if member.phase is Phase.STARTING and now_s - member.since_s >= self._start_limit_s:
            reason = f"{member.worker_id}: not ready after {self._start_limit_s:.0f} s"
            self._pools[member.role].note_crash(now_s, reason)
        member.enter(Phase.KILLED, now_s)
        return [KillWorker(member.worker_id)]

    def _free_id(self, role: Role) -> str:
        """The lowest number that nobody alive has: a replacement takes the place of the dead."""
        return next(name for idx in range(len(self._members) + 1) if (name := f"{role}-{idx}") not in self._members)

    def _staying(self, role: Role) -> list[Member]:
        """Members that are not on their way out, youngest first."""
        staying = [
            member
            for member in self._members.values()
            if member.role is role and member.phase in (Phase.STARTING, Phase.READY)
        ]
        return sorted(staying, key=lambda member: -member.birth)

    def _num_missing(self, role: Role) -> int:
        return self._pools[role].replicas - len(self._staying(role))

    def _status(self, role: Role, now_s: float) -> PoolStatus:
        pool = self._pools[role]
        phases = [member.phase for member in self._members.values() if member.role is role]
        return PoolStatus(
            role=role,
            desired=pool.replicas,
            starting=phases.count(Phase.STARTING),
            ready=phases.count(Phase.READY),
            draining=phases.count(Phase.DRAINING) + phases.count(Phase.KILLED),
            num_crashes=pool.num_crashes,
            last_failure=pool.last_failure,
            retry_in_s=max(0.0, pool.not_before_s - now_s) if self._num_missing(role) > 0 else 0.0,
        )
