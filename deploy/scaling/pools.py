"""Decides which workers to start, drain, replace and give another role, so that each pool has the size it should have.
Pure: no IO.

One member is one process. Its phases:

    STARTING -ready-> READY -too many-> DRAINING -grace over-> KILLED
        \\--too many or too slow-------------------------------^
    READY -too many here, too few there-> CHANGING -ready-> READY, in the other pool
                                              \\--refused-> READY, where it was; too slow-> KILLED
    any -ended-> gone; the pool is then filled up again

A worker that is one too many in its pool while the other lacks one takes that role: its weights stay loaded. It counts
there from then on. Where workers cannot change, one drains and another starts.

A member that ends by itself counts as a crash: the first is replaced at once, then the pool waits 1, 2, 4 ... 30 s,
until a member has been ready for a while. A READY member that ends normally was drained by somebody and is replaced.
The youngest leave first: the oldest have the warmest caches; a change of role makes a worker young.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.values.messages import Role
from deploy.scaling.pool_members import STAYING, ChangeStatus, Identity, Member, Phase, Pool, PoolStatus

START_LIMIT_S = 600.0
KILL_MARGIN_S = 5.0
STABLE_AFTER_S = 30.0
# A role change takes no longer than its grace and this.
CHANGE_LIMIT_S = 30.0


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizesSet:
    """Somebody wants the pools to have so many workers. At once, so that a worker can go from one to the other."""

    sizes: tuple[tuple[Role, int], ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """A controller begins: the sizes wanted, and who an earlier one left running, with what its place was asked for."""

    sizes: tuple[tuple[Role, int], ...]
    found: tuple[tuple[Identity, Role], ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker_id: str


@dataclass(frozen=True, slots=True)
class RoleRefused:
    """A CHANGING worker cannot serve the other role, as none of its configuration can; it goes on as it was."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The process is gone. `reason` is empty when it ended normally, after a drain."""

    worker_id: str
    reason: str


PoolEvent = Begun | SizesSet | WorkerReady | RoleRefused | WorkerEnded


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Ends in WorkerReady and later WorkerEnded, or in WorkerEnded alone."""

    role: Role
    worker_id: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Drain, then serve the other role around the same weights. From now on the process goes by the new name.

    Ends in WorkerReady, RoleRefused or WorkerEnded.
    """

    from_worker_id: str
    role: Role
    worker_id: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class DrainWorker:
    worker_id: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class KillWorker:
    worker_id: str


PoolEffect = StartWorker | ChangeRole | DrainWorker | KillWorker


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times that members get. `change_problem`: why none can change its role; empty = they can."""

    drain_grace_s: float
    start_limit_s: float = START_LIMIT_S
    change_grace_s: float = 10.0
    change_problem: str = ""


class PoolCore:
    """Owns the desired sizes and the members of both pools."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._pools = {role: Pool() for role in Role}
        self._members: dict[str, Member] = {}
        self._num_births = 0

    @property
    def num_members(self) -> int:
        """Workers of any phase: 0 = every process is gone."""
        return len(self._members)

    @property
    def change_problem(self) -> str:
        """Why workers are started and stopped instead of changing their role; empty = they change.

        While a worker lives that could not, no other is asked: as a rule they are configured alike.
        """
        refusals = (member.refusal for member in self._members.values() if member.refusal)
        return self._limits.change_problem or next(refusals, "")

    def is_wanted(self, worker_id: str) -> bool:
        """False for a worker that is on its way out, since its pool has too many or it was too slow."""
        return self._members[worker_id].phase in STAYING

    def desired(self) -> dict[str, int]:
        return {role.value: pool.replicas for role, pool in self._pools.items()}

    def places(self) -> dict[str, int]:
        """How many places each role needs: those that are taken, by whatever role now, and those still to be had."""
        taken = Counter(member.placed_as for member in self._members.values())
        return {role.value: taken[role] + self._num_to_start(role) for role in Role}

    def status(self, now_s: float) -> list[PoolStatus]:
        return [self._status(role, now_s) for role in Role]

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        """Take in what happened; answers what to do about it."""
        match event:
            case Begun(sizes, found):
                self._set_sizes(sizes)
                for identity, placed_as in found:
                    self._add(identity, placed_as, now_s, is_found=True)
            case SizesSet(sizes):
                self._set_sizes(sizes)
            case WorkerReady(worker_id):
                self._on_ready(worker_id, now_s)
            case RoleRefused(worker_id, reason):
                self._on_refused(worker_id, reason, now_s)
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
        deadlines += [pool.not_before_s for role, pool in self._pools.items() if self._num_to_start(role) > 0]
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        for role, pool in self._pools.items():
            assert pool.replicas >= 0
            assert sum(member.phase is not Phase.CHANGING for member in self._staying(role)) <= pool.replicas
        for worker_id, member in self._members.items():
            assert member.worker_id == worker_id
            assert (member.deadline_s is None) == (member.phase in (Phase.READY, Phase.KILLED))
            assert member.before is not None or member.phase is not Phase.CHANGING
            assert member.before is None or member.phase in (Phase.CHANGING, Phase.DRAINING, Phase.KILLED)
        before = [member.before.worker_id for member in self._members.values() if member.before is not None]
        assert len({*self._members, *before}) == len(self._members) + len(before), "two workers of one name"

    # ---- events -------------------------------------------------------------------------------------

    def _set_sizes(self, sizes: Sequence[tuple[Role, int]]) -> None:
        for role, replicas in sizes:
            self._pools[role].replicas = replicas

    def _on_ready(self, worker_id: str, now_s: float) -> None:
        member = self._members[worker_id]
        member.before = None
        if member.phase is Phase.CHANGING:
            self._pools[member.role].note_change(now_s - member.since_s)
        if member.phase in (Phase.CHANGING, Phase.STARTING):
            member.enter(Phase.READY, now_s)

    def _on_refused(self, worker_id: str, reason: str, now_s: float) -> None:
        member = self._members[worker_id]
        member.refusal = reason
        assert member.before is not None
        self._rename(member, member.before)
        member.before = None
        if member.phase is Phase.CHANGING:
            member.enter(Phase.READY, now_s)

    def _on_ended(self, worker_id: str, reason: str, now_s: float) -> None:
        member = self._members.pop(worker_id)
        pool = self._pools[member.role]
        if member.phase is Phase.READY and now_s - member.since_s >= STABLE_AFTER_S:
            pool.num_crashes = 0
        if member.phase in STAYING and reason:
            pool.note_crash(now_s, f"{worker_id}: {reason}")

    # ---- what to do ---------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[PoolEffect]:
        effects: list[PoolEffect] = []
        for role in Role:
            changeable = self._changeable(role.other)
            effects += [self._change(member, role, now_s) for member in changeable[: max(0, self._num_missing(role))]]
        for role, pool in self._pools.items():
            if now_s >= pool.not_before_s:
                effects += [self._start(role, now_s) for _ in range(self._num_to_start(role))]
        for role in Role:
            for member in self._surplus(role)[self._num_awaited(role.other) :]:
                effects += self._remove(member, now_s)
        return effects

    def _change(self, member: Member, role: Role, now_s: float) -> PoolEffect:
        before, grace_s = member.identity, self._limits.change_grace_s
        self._rename(member, Identity(role, self._free_id(role)))
        self._num_births += 1
        member.before, member.birth = before, self._num_births
        member.enter(Phase.CHANGING, now_s, now_s + grace_s + CHANGE_LIMIT_S)
        return ChangeRole(before.worker_id, role, member.worker_id, grace_s)

    def _start(self, role: Role, now_s: float) -> PoolEffect:
        identity = Identity(role, self._free_id(role))
        self._add(identity, role, now_s, is_found=False)
        return StartWorker(role, identity.worker_id)

    def _add(self, identity: Identity, placed_as: Role, now_s: float, *, is_found: bool) -> None:
        self._num_births += 1
        deadline_s = now_s + self._limits.start_limit_s
        self._members[identity.worker_id] = Member(
            identity, placed_as, self._num_births, Phase.STARTING, now_s, deadline_s, is_found
        )

    def _rename(self, member: Member, identity: Identity) -> None:
        del self._members[member.worker_id]
        member.identity = identity
        self._members[identity.worker_id] = member

    def _remove(self, member: Member, now_s: float) -> Sequence[PoolEffect]:
        if member.phase is Phase.STARTING and not member.is_found:
            return self._kill(member, now_s)  # it has served no request
        grace_s = self._limits.drain_grace_s
        member.enter(Phase.DRAINING, now_s, now_s + grace_s + KILL_MARGIN_S)
        return [DrainWorker(member.worker_id, grace_s)]

    def _kill(self, member: Member, now_s: float) -> Sequence[PoolEffect]:
        took_s = now_s - member.since_s
        if member.phase is Phase.STARTING and took_s >= self._limits.start_limit_s:
            self._pools[member.role].note_crash(now_s, f"{member.worker_id}: not ready after {took_s:.0f} s")
        if member.phase is Phase.CHANGING and member.before is not None:
            text = f"{member.worker_id}: no {member.role.value} worker {took_s:.0f} s after {member.before.worker_id}"
            self._pools[member.role].note_crash(now_s, f"{text} was asked to change")
        member.enter(Phase.KILLED, now_s)
        return [KillWorker(member.worker_id)]

    # ---- counting -----------------------------------------------------------------------------------

    def _free_id(self, role: Role) -> str:
        """The lowest number that no living worker has: a replacement takes the place of the dead."""
        taken = {*self._members, *(member.before.worker_id for member in self._members.values() if member.before)}
        return next(name for idx in range(len(taken) + 1) if (name := f"{role}-{idx}") not in taken)

    def _staying(self, role: Role) -> list[Member]:
        """Members that are not on their way out, youngest first."""
        staying = [member for member in self._members.values() if member.role is role and member.phase in STAYING]
        return sorted(staying, key=lambda member: -member.birth)

    def _num_missing(self, role: Role) -> int:
        return self._pools[role].replicas - len(self._staying(role))

    def _surplus(self, role: Role) -> list[Member]:
        """Members that are too many. First those that still change to this role, then the youngest."""
        staying = sorted(self._staying(role), key=lambda member: member.phase is not Phase.CHANGING)
        return staying[: max(0, -self._num_missing(role))]

    def _changeable(self, role: Role) -> list[Member]:
        """Members that are too many here and can serve the other role."""
        return [member for member in self._surplus(role) if member.phase is Phase.READY and not self.change_problem]

    def _num_awaited(self, role: Role) -> int:
        """Members that will change to `role` as soon as they have arrived in the other pool, which has too many."""
        coming = [member for member in self._surplus(role.other) if member.phase is Phase.CHANGING]
        return min(len(coming), max(0, self._num_missing(role))) if not self.change_problem else 0

    def _num_to_start(self, role: Role) -> int:
        return max(0, self._num_missing(role) - self._num_awaited(role))

    def _status(self, role: Role, now_s: float) -> PoolStatus:
        pool = self._pools[role]
        members = [member for member in self._members.values() if member.role is role]
        phases = [member.phase for member in members]
        return PoolStatus(
            role=role,
            desired=pool.replicas,
            starting=phases.count(Phase.STARTING),
            ready=phases.count(Phase.READY),
            draining=phases.count(Phase.DRAINING) + phases.count(Phase.KILLED),
            changing=tuple(
                ChangeStatus(member.worker_id, member.before.worker_id, now_s - member.since_s)
                for member in members
                if member.before is not None and member.phase is Phase.CHANGING
            ),
            num_crashes=pool.num_crashes,
            last_failure=pool.last_failure,
            retry_in_s=max(0.0, pool.not_before_s - now_s) if self._num_to_start(role) > 0 else 0.0,
            num_changes=pool.num_changes,
            last_change_s=pool.last_change_s,
        )
