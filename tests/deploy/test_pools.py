"""The pool core: events in, effects out."""

import random

import pytest

from common.messages import Role
from deploy.pool_members import MAX_BACKOFF_S, Identity, PoolStatus
from deploy.pools import (
    CHANGE_LIMIT_S,
    KILL_MARGIN_S,
    STABLE_AFTER_S,
    START_LIMIT_S,
    Begun,
    ChangeRole,
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolEvent,
    PoolLimits,
    RoleRefused,
    SizesSet,
    StartWorker,
    WorkerEnded,
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


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_pool_is_filled_with_numbered_workers(rig: Rig) -> None:
    assert rig.do(size(PREFILL, 2)) == [StartWorker(PREFILL, "prefill-0"), StartWorker(PREFILL, "prefill-1")]
    assert rig.do(size(DECODE, 1)) == [StartWorker(DECODE, "decode-0")]
    assert rig.do(size(PREFILL, 2)) == []
    assert rig.core.desired() == {"prefill": 2, "decode": 1}


def test_scaling_down_drains_the_youngest_and_waits_for_it(rig: Rig) -> None:
    rig.ready(DECODE, 3)
    assert rig.do(size(DECODE, 1)) == [DrainWorker("decode-2", GRACE_S), DrainWorker("decode-1", GRACE_S)]
    assert rig.status(DECODE).draining == 2
    assert rig.do(WorkerEnded("decode-2", "")) == []
    assert rig.do(WorkerEnded("decode-1", "")) == []
    assert (rig.status(DECODE).ready, rig.core.num_members) == (1, 1)


def test_the_youngest_is_the_one_started_last_whatever_its_number(rig: Rig) -> None:
    rig.ready(DECODE, 2)
    assert rig.do(WorkerEnded("decode-0", "killed")) == [StartWorker(DECODE, "decode-0")]
    rig.do(WorkerReady("decode-0"))
    assert rig.do(size(DECODE, 1)) == [DrainWorker("decode-0", GRACE_S)]


def test_scaling_up_while_draining_starts_a_new_worker_under_a_free_name(rig: Rig) -> None:
    rig.ready(DECODE, 2)
    rig.do(size(DECODE, 1))
    assert rig.do(size(DECODE, 2)) == [StartWorker(DECODE, "decode-2")]


def test_a_worker_that_does_not_drain_in_time_is_killed_once(rig: Rig) -> None:
    rig.ready(DECODE, 1)
    rig.do(size(DECODE, 0))
    assert rig.wait(GRACE_S + KILL_MARGIN_S - 1) == []
    assert rig.wait(2) == [KillWorker("decode-0")]
    assert rig.wait(1000) == []
    assert rig.do(WorkerEnded("decode-0", "killed")) == []
    assert rig.status(DECODE).num_crashes == 0


def test_a_starting_worker_that_is_not_wanted_any_more_is_killed_at_once(rig: Rig) -> None:
    rig.do(size(PREFILL, 1))
    assert rig.do(size(PREFILL, 0)) == [KillWorker("prefill-0")]
    assert rig.do(WorkerReady("prefill-0")) == []  # it got ready just before
    assert rig.do(WorkerEnded("prefill-0", "killed")) == []
    assert rig.status(PREFILL).num_crashes == 0


def test_a_worker_that_somebody_drained_is_replaced_and_is_no_crash(rig: Rig) -> None:
    rig.ready(DECODE, 1)
    assert rig.do(WorkerEnded("decode-0", "")) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).num_crashes == 0


def test_a_crash_loop_backs_off_and_says_why(rig: Rig) -> None:
    """1. the first crash is replaced at once; 2. each further one waits twice as long, up to a limit."""
    rig.do(size(DECODE, 1))
    assert rig.do(WorkerEnded("decode-0", "no memory")) == [StartWorker(DECODE, "decode-0")]
    for expected_s in (1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S):
        assert rig.do(WorkerEnded("decode-0", "no memory")) == []
        assert rig.status(DECODE).retry_in_s == expected_s
        assert rig.wait(expected_s - 0.5) == []
        assert rig.wait(0.5) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).last_failure == "decode-0: no memory"
    assert rig.status(DECODE).retry_in_s == 0


def test_a_crash_after_a_stable_time_is_replaced_at_once_again(rig: Rig) -> None:
    rig.do(size(DECODE, 1))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.wait(1)
    rig.do(WorkerReady("decode-0"))
    rig.wait(STABLE_AFTER_S)
    assert rig.do(WorkerEnded("decode-0", "x")) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).num_crashes == 1


def test_one_pools_crashes_do_not_slow_the_other(rig: Rig) -> None:
    rig.ready(PREFILL, 1)
    rig.do(size(DECODE, 1))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.do(WorkerEnded("decode-0", "x"))
    assert rig.do(WorkerEnded("prefill-0", "x")) == [StartWorker(PREFILL, "prefill-0")]


def test_a_worker_that_never_gets_ready_is_killed_and_counts_as_a_crash(rig: Rig) -> None:
    rig.do(size(DECODE, 1))
    assert KillWorker("decode-0") in rig.wait(START_LIMIT_S)
    assert rig.status(DECODE).num_crashes == 1
    assert "not ready" in rig.status(DECODE).last_failure


def test_emptying_both_pools_ends_with_no_member(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 2)
    rig.do(size(PREFILL, 0))
    rig.do(size(DECODE, 0))
    for worker_id in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert rig.do(WorkerEnded(worker_id, "")) == []
    assert rig.core.num_members == 0
    assert rig.core.next_deadline_s() is None


def begin(rig: Rig, sizes: dict[Role, int], *found: tuple[Role, str]) -> list[PoolEffect]:
    return rig.do(Begun(tuple(sizes.items()), tuple((Identity(*worker), worker[0]) for worker in found)))


def test_a_controller_goes_on_with_the_workers_that_it_finds(rig: Rig) -> None:
    """1. two of three are there, and only the third is started; 2. they are ready without having been started."""
    effects = begin(rig, {PREFILL: 1, DECODE: 2}, (PREFILL, "prefill-0"), (DECODE, "decode-1"))
    assert effects == [StartWorker(DECODE, "decode-0")]
    for worker_id in ("prefill-0", "decode-1", "decode-0"):
        assert rig.do(WorkerReady(worker_id)) == []
    assert (rig.status(PREFILL).ready, rig.status(DECODE).ready) == (1, 2)


def test_a_found_worker_that_is_one_too_many_is_drained_since_it_may_serve(rig: Rig) -> None:
    effects = begin(rig, {PREFILL: 0, DECODE: 1}, (DECODE, "decode-0"), (DECODE, "decode-1"))
    assert effects == [DrainWorker("decode-1", GRACE_S)]
    assert rig.do(WorkerReady("decode-1")) == []
    assert rig.status(DECODE).draining == 1


def test_a_found_worker_that_does_not_answer_is_replaced(rig: Rig) -> None:
    begin(rig, {DECODE: 1}, (DECODE, "decode-0"))
    assert KillWorker("decode-0") in rig.wait(START_LIMIT_S)
    assert rig.status(DECODE).num_crashes == 1


def test_the_start_limit_can_be_longer_where_nodes_have_to_be_made_first() -> None:
    core = PoolCore(PoolLimits(GRACE_S, start_limit_s=3600.0))
    core.handle(size(DECODE, 1), 0.0)
    assert core.next_deadline_s() == 3600.0


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


def test_a_worker_that_refuses_goes_on_as_it_was_and_nobody_is_asked_again(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 1)
    rig.do(sizes(1, 2))
    assert rig.do(RoleRefused("decode-1", "dtype: differs")) == [
        StartWorker(DECODE, "decode-1"),
        DrainWorker("prefill-1", GRACE_S),
    ]
    assert rig.core.change_problem == "dtype: differs"
    assert rig.status(DECODE).num_crashes == 0


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
        """A worker that changes has, or cannot; also one that was told to leave meanwhile."""
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
