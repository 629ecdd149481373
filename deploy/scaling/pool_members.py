"""What the pool core remembers of its workers and pools, and how that looks to an operator. Pure: no IO."""

from dataclasses import dataclass
from enum import StrEnum

from common.values.messages import Role

MAX_BACKOFF_S = 30.0


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CHANGING = "changing"
    DRAINING = "draining"
    KILLED = "killed"


STAYING = (Phase.STARTING, Phase.READY, Phase.CHANGING)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker serves, and under which name."""

    role: Role
    worker_id: str


@dataclass(slots=True)
class Member:
    """One worker of a pool. `deadline_s`: when it is killed unless it gets on. `is_found`: it may serve already.

    A CHANGING member belongs to the pool that it is on its way to; `before` is what it was, as long as it may still be
    that: also when it was asked to end on its way.
    `refusal` is why it could not change its role, if it was asked and could not.
    `placed_as` is the role that its place was asked for: a change of role does not move it.
    """

    identity: Identity
    placed_as: Role
    birth: int
    phase: Phase
    since_s: float
    deadline_s: float | None
    is_found: bool = False
    before: Identity | None = None
    refusal: str = ""

    @property
    def role(self) -> Role:
        return self.identity.role

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    def enter(self, phase: Phase, now_s: float, deadline_s: float | None = None) -> None:
        self.phase, self.since_s, self.deadline_s = phase, now_s, deadline_s


@dataclass(slots=True)
class Pool:
    """What is wanted of one role, how its crashes go, and how long the last change to it took."""

    replicas: int = 0
    num_crashes: int = 0
    not_before_s: float = 0.0
    last_failure: str = ""
    num_changes: int = 0
    last_change_s: float | None = None

    def note_crash(self, now_s: float, reason: str) -> None:
        self.num_crashes += 1
        self.last_failure = reason
        if self.num_crashes > 1:
            self.not_before_s = now_s + min(MAX_BACKOFF_S, 2.0 ** (self.num_crashes - 2))

    def note_change(self, took_s: float) -> None:
        self.num_changes += 1
        self.last_change_s = took_s


@dataclass(frozen=True, slots=True)
class ChangeStatus:
    """A worker on its way into a pool."""

    worker_id: str
    from_worker_id: str
    age_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as an operator sees it. `retry_in_s` > 0: a crash loop is being slowed down.

    `changing`: workers of the other role that become members. `num_changes` did, the last in `last_change_s`.
    """

    role: Role
    desired: int
    starting: int
    ready: int
    draining: int
    changing: tuple[ChangeStatus, ...]
    num_crashes: int
    last_failure: str
    retry_in_s: float
    num_changes: int
    last_change_s: float | None

    @property
    def is_still(self) -> bool:
        """As many as wanted, all of them ready, and none starting or leaving."""
        return self.ready == self.desired and not (self.starting or self.draining or self.changing)
