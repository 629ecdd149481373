"""A pool core with a clock, for its tests."""

from common.values.messages import Role
from deploy.scaling.pool_members import PoolStatus
from deploy.scaling.pools import (
    PoolCore,
    PoolEffect,
    PoolEvent,
    PoolLimits,
    SizesSet,
    StartWorker,
    WorkerReady,
)

GRACE_S = 30.0
CHANGE_GRACE_S = 7.0
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def size(role: Role, replicas: int) -> SizesSet:
    return SizesSet(((role, replicas),))


def sizes(prefill: int, decode: int) -> SizesSet:
    return SizesSet(((PREFILL, prefill), (DECODE, decode)))


class Rig:
    """A core with a clock, checked after every step."""

    def __init__(self) -> None:
        self.core = PoolCore(PoolLimits(GRACE_S, change_grace_s=CHANGE_GRACE_S))
        self.now_s = 100.0

    def do(self, event: PoolEvent) -> list[PoolEffect]:
        effects = self.core.handle(event, self.now_s)
        self.core.check_invariants()
        return effects

    def wait(self, duration_s: float) -> list[PoolEffect]:
        """Let time pass, stopping at every deadline."""
        effects: list[PoolEffect] = []
        end_s = self.now_s + duration_s
        while (deadline_s := self.core.next_deadline_s()) is not None and deadline_s <= end_s:
            self.now_s = max(self.now_s, deadline_s)
            effects += self.core.handle_deadline(self.now_s)
            self.core.check_invariants()
        self.now_s = end_s
        return effects

    def status(self, role: Role) -> PoolStatus:
        return next(status for status in self.core.status(self.now_s) if status.role is role)

    def ready(self, role: Role, count: int) -> None:
        """Bring a pool to `count` ready workers."""
        for effect in self.do(size(role, count)):
            assert isinstance(effect, StartWorker)
            self.do(WorkerReady(effect.worker_id))
