"""The pool core: changes of role, and random lives of workers."""

import random

import pytest

from common.values.messages import Role
from deploy.scaling.pool_members import MAX_BACKOFF_S
from deploy.scaling.pools import (
    CHANGE_LIMIT_S,
    ChangeRole,
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolLimits,
    RoleRefused,
    StartWorker,
    WorkerEnded,
    WorkerReady,
)
from tests.deploy.scaling.pool_rig import CHANGE_GRACE_S, DECODE, GRACE_S, PREFILL, Rig, size, sizes


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_worker_too_many_takes_the_role_that_lacks_one(rig: Rig) -> None:
    """1. 2+1 to 1+2: the youngest prefill worker changes; 2. it counts as a decode worker; 3. nothing was started."""
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    assert rig.do(sizes(1, 2)) == [ChangeRole("prefill-1", DECODE, "decode-1", CHANGE_GRACE_S)]
    (change,) = rig.status(DECODE).changing
    assert (change.from_worker_id, change.worker_id) == ("prefill-1", "decode-1")
    assert not rig.status(DECODE).is_still
    assert rig.wait(3) == []
    assert rig.do(WorkerReady("decode-1")) == []
    status = rig.status(DECODE)
    assert (status.ready, status.num_changes, status.last_change_s) == (2, 1, 3.0)
    assert [status.is_still for status in rig.core.status(rig.now_s)] == [True, True]


def test_what_the_total_lacks_is_started_and_what_it_has_too_many_is_drained(rig: Rig) -> None:
    rig.ready(PREFILL, 3)
    rig.ready(DECODE, 1)
    assert rig.do(sizes(2, 3)) == [
        ChangeRole("prefill-2", DECODE, "decode-1", CHANGE_GRACE_S),
        StartWorker(DECODE, "decode-2"),
    ]
    rig.do(WorkerReady("decode-1"))
    rig.do(WorkerReady("decode-2"))
    assert rig.do(sizes(3, 1)) == [
        ChangeRole("decode-2", PREFILL, "prefill-2", CHANGE_GRACE_S),
        DrainWorker("decode-1", GRACE_S),
    ]


def test_a_worker_that_changed_is_young_and_the_next_to_change_back(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    rig.do(WorkerReady("decode-1"))
    assert rig.do(sizes(2, 1)) == [ChangeRole("decode-1", PREFILL, "prefill-1", CHANGE_GRACE_S)]


def test_a_change_that_is_taken_back_on_its_way_starts_and_ends_nobody(rig: Rig) -> None:
    """1. 2+1 to 1+2; 2. back to 2+1 while it changes; 3. it arrives, and goes back."""
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(sizes(2, 1)) == []
    assert rig.core.places() == {"prefill": 2, "decode": 1}
    assert rig.do(WorkerReady("decode-1")) == [ChangeRole("decode-1", PREFILL, "prefill-1", CHANGE_GRACE_S)]


def test_a_changing_worker_that_is_not_wanted_at_all_drains(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(sizes(1, 1)) == [DrainWorker("decode-1", GRACE_S)]
    assert rig.do(WorkerReady("decode-1")) == []  # it had arrived just before
    assert rig.do(WorkerEnded("decode-1", "")) == []
    assert rig.core.num_members == 2


def test_the_old_name_is_nobodys_until_the_change_is_over(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(size(PREFILL, 2)) == [StartWorker(PREFILL, "prefill-2")]
    rig.do(WorkerReady("decode-1"))
    assert rig.do(size(PREFILL, 3)) == [StartWorker(PREFILL, "prefill-1")]


def test_where_roles_cannot_change_one_drains_and_another_starts() -> None:
    rig = Rig()
    rig.core = PoolCore(PoolLimits(GRACE_S, change_problem="dtype: float32 here, bfloat16 there"))
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    assert rig.do(sizes(1, 2)) == [StartWorker(DECODE, "decode-1"), DrainWorker("prefill-1", GRACE_S)]


def test_a_worker_that_refuses_goes_on_as_it_was_and_nobody_is_asked_while_it_lives(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(RoleRefused("decode-1", "dtype: differs")) == [
        StartWorker(DECODE, "decode-1"),
        DrainWorker("prefill-1", GRACE_S),
    ]
    assert rig.core.change_problem == "dtype: differs"
    assert rig.status(DECODE).num_crashes == 0
    rig.do(WorkerEnded("prefill-1", ""))
    assert rig.core.change_problem == ""


def test_a_change_that_takes_too_long_is_killed_and_counts_as_a_crash(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.wait(CHANGE_GRACE_S + CHANGE_LIMIT_S - 0.1) == []
    assert rig.wait(0.2) == [KillWorker("decode-1"), StartWorker(DECODE, "decode-2")]
    assert "after prefill-1 was asked to change" in rig.status(DECODE).last_failure


def test_a_worker_that_dies_while_it_changes_is_replaced_where_it_was_going(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(WorkerEnded("decode-1", "no memory")) == [StartWorker(DECODE, "decode-1")]
    assert rig.status(DECODE).last_failure == "decode-1: no memory"


def test_a_starting_worker_does_not_change_since_it_has_loaded_nothing(rig: Rig) -> None:
    rig.do(sizes(1, 0))
    assert rig.do(sizes(0, 1)) == [StartWorker(DECODE, "decode-0"), KillWorker("prefill-0")]


def test_places_are_counted_by_what_they_were_asked_for(rig: Rig) -> None:
    """A changed worker stays on the node of its first role, so no node of the new one is asked for."""
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    rig.do(WorkerReady("decode-1"))
    assert rig.core.places() == {"prefill": 2, "decode": 1}
    rig.do(WorkerEnded("decode-1", "killed"))
    assert rig.core.places() == {"prefill": 1, "decode": 2}


class World:
    """Workers that start, crash, hang, drain and change their role at random.

    Fails when the core asks for something impossible. `changing`: what a worker was, by its new name.
    """

    def __init__(self, seed: int) -> None:
        self.rig, self.rng = Rig(), random.Random(seed)
        self.starting: set[str] = set()
        self.ready: set[str] = set()
        self.leaving: set[str] = set()
        self.changing: dict[str, str] = {}

    @property
    def alive(self) -> set[str]:
        return self.starting | self.ready | self.leaving | set(self.changing)

    def perform(self, effects: list[PoolEffect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker(_, worker_id):
                    assert worker_id not in self.alive | set(self.changing.values())
                    self.starting.add(worker_id)
                case ChangeRole(before, role, worker_id, _):
                    assert before in self.ready
                    assert worker_id not in self.alive | set(self.changing.values())
                    assert worker_id.startswith(role) != before.startswith(role)
                    self.ready.discard(before)
                    self.changing[worker_id] = before
                case DrainWorker(worker_id, _) | KillWorker(worker_id):
                    assert worker_id in self.alive
                    self.starting.discard(worker_id)
                    self.ready.discard(worker_id)
                    self.leaving.add(worker_id)

    def end(self, worker_id: str, reason: str) -> None:
        for group in (self.starting, self.ready, self.leaving):
            group.discard(worker_id)
        self.changing.pop(worker_id, None)
        self.perform(self.rig.do(WorkerEnded(worker_id, reason)))

    def answer(self, worker_id: str, *, is_refused: bool) -> None:
        """A worker that changes has, or cannot; also one that was asked to leave meanwhile."""
        before = self.changing.pop(worker_id)
        group = self.leaving if worker_id in self.leaving else self.ready
        group.discard(worker_id)
        group.add(before if is_refused else worker_id)
        event = RoleRefused(worker_id, "dtype") if is_refused else WorkerReady(worker_id)
        self.perform(self.rig.do(event))

    def get_ready(self, worker_id: str) -> None:
        self.starting.discard(worker_id)
        self.ready.add(worker_id)
        self.perform(self.rig.do(WorkerReady(worker_id)))

    def step(self) -> None:
        """One random thing."""
        rng, choice = self.rng, self.rng.randrange(6)
        if choice == 0:
            self.perform(self.rig.do(size(rng.choice([PREFILL, DECODE]), rng.randint(0, 4))))
        elif choice == 4:
            self.perform(self.rig.do(sizes(rng.randint(0, 4), rng.randint(0, 4))))
        elif choice == 5 and self.changing:
            self.answer(rng.choice(sorted(self.changing)), is_refused=rng.random() < 0.05)
        elif choice == 1 and self.starting:
            self.get_ready(rng.choice(sorted(self.starting)))
        elif choice == 2 and self.alive:
            self.end(rng.choice(sorted(self.alive)), rng.choice(["", "crash"]))
        else:
            self.perform(self.rig.wait(rng.uniform(0, 40)))

    def behave(self) -> None:
        """From now on everybody does what is asked."""
        for worker_id in sorted(self.changing):
            self.answer(worker_id, is_refused=False)
        for worker_id in sorted(self.leaving):
            self.end(worker_id, "")
        for worker_id in sorted(self.starting):
            self.get_ready(worker_id)
        self.perform(self.rig.wait(MAX_BACKOFF_S))


@pytest.mark.parametrize("seed", range(200))
def test_random_lives_end_at_the_wanted_size(seed: int) -> None:
    """1. 60 random things happen; 2. then the world behaves, and the pools are what they should be."""
    world = World(seed)
    for _ in range(60):
        world.step()
    for _ in range(20):
        world.behave()
    for role in Role:
        assert world.rig.status(role).is_still
