"""The pool core: events in, effects out."""

import random

import pytest

from common.messages import Role
from deploy.pools import (
    KILL_MARGIN_S,
    MAX_BACKOFF_S,
    STABLE_AFTER_S,
    START_LIMIT_S,
    Begun,
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolEvent,
    PoolStatus,
    SizeSet,
    StartWorker,
    WorkerEnded,
    WorkerReady,
)

GRACE_S = 30.0
PREFILL, DECODE = Role.PREFILL, Role.DECODE


class Rig:
    """A core with a clock, checked after every step."""

    def __init__(self) -> None:
        self.core = PoolCore(GRACE_S)
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
        for effect in self.do(SizeSet(role, count)):
            assert isinstance(effect, StartWorker)
            self.do(WorkerReady(effect.worker_id))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_pool_is_filled_with_numbered_workers(rig: Rig) -> None:
    assert rig.do(SizeSet(PREFILL, 2)) == [StartWorker(PREFILL, "prefill-0"), StartWorker(PREFILL, "prefill-1")]
    assert rig.do(SizeSet(DECODE, 1)) == [StartWorker(DECODE, "decode-0")]
    assert rig.do(SizeSet(PREFILL, 2)) == []
    assert rig.core.desired() == {"prefill": 2, "decode": 1}


def test_scaling_down_drains_the_youngest_and_waits_for_it(rig: Rig) -> None:
    rig.ready(DECODE, 3)
    assert rig.do(SizeSet(DECODE, 1)) == [DrainWorker("decode-2", GRACE_S), DrainWorker("decode-1", GRACE_S)]
    assert rig.status(DECODE).draining == 2
    assert rig.do(WorkerEnded("decode-2", "")) == []
    assert rig.do(WorkerEnded("decode-1", "")) == []
    assert (rig.status(DECODE).ready, rig.core.num_members) == (1, 1)


def test_the_youngest_is_the_one_started_last_whatever_its_number(rig: Rig) -> None:
    rig.ready(DECODE, 2)
    assert rig.do(WorkerEnded("decode-0", "killed")) == [StartWorker(DECODE, "decode-0")]
    rig.do(WorkerReady("decode-0"))
    assert rig.do(SizeSet(DECODE, 1)) == [DrainWorker("decode-0", GRACE_S)]


def test_scaling_up_while_draining_starts_a_new_worker_under_a_free_name(rig: Rig) -> None:
    rig.ready(DECODE, 2)
    rig.do(SizeSet(DECODE, 1))
    assert rig.do(SizeSet(DECODE, 2)) == [StartWorker(DECODE, "decode-2")]


def test_a_worker_that_does_not_drain_in_time_is_killed_once(rig: Rig) -> None:
    rig.ready(DECODE, 1)
    rig.do(SizeSet(DECODE, 0))
    assert rig.wait(GRACE_S + KILL_MARGIN_S - 1) == []
    assert rig.wait(2) == [KillWorker("decode-0")]
    assert rig.wait(1000) == []
    assert rig.do(WorkerEnded("decode-0", "killed")) == []
    assert rig.status(DECODE).num_crashes == 0


def test_a_starting_worker_that_is_not_wanted_any_more_is_killed_at_once(rig: Rig) -> None:
    rig.do(SizeSet(PREFILL, 1))
    assert rig.do(SizeSet(PREFILL, 0)) == [KillWorker("prefill-0")]
    assert rig.do(WorkerReady("prefill-0")) == []  # it got ready just before
    assert rig.do(WorkerEnded("prefill-0", "killed")) == []
    assert rig.status(PREFILL).num_crashes == 0


def test_a_worker_that_somebody_drained_is_replaced_and_is_no_crash(rig: Rig) -> None:
    rig.ready(DECODE, 1)
    assert rig.do(WorkerEnded("decode-0", "")) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).num_crashes == 0


def test_a_crash_loop_backs_off_and_says_why(rig: Rig) -> None:
    """1. the first crash is replaced at once; 2. each further one waits twice as long, up to a limit."""
    rig.do(SizeSet(DECODE, 1))
    assert rig.do(WorkerEnded("decode-0", "no memory")) == [StartWorker(DECODE, "decode-0")]
    for expected_s in (1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S):
        assert rig.do(WorkerEnded("decode-0", "no memory")) == []
        assert rig.status(DECODE).retry_in_s == expected_s
        assert rig.wait(expected_s - 0.5) == []
        assert rig.wait(0.5) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).last_failure == "decode-0: no memory"
    assert rig.status(DECODE).retry_in_s == 0


def test_a_crash_after_a_stable_time_is_replaced_at_once_again(rig: Rig) -> None:
    rig.do(SizeSet(DECODE, 1))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.wait(1)
    rig.do(WorkerReady("decode-0"))
    rig.wait(STABLE_AFTER_S)
    assert rig.do(WorkerEnded("decode-0", "x")) == [StartWorker(DECODE, "decode-0")]
    assert rig.status(DECODE).num_crashes == 1


def test_one_pools_crashes_do_not_slow_the_other(rig: Rig) -> None:
    rig.ready(PREFILL, 1)
    rig.do(SizeSet(DECODE, 1))
    rig.do(WorkerEnded("decode-0", "x"))
    rig.do(WorkerEnded("decode-0", "x"))
    assert rig.do(WorkerEnded("prefill-0", "x")) == [StartWorker(PREFILL, "prefill-0")]


def test_a_worker_that_never_gets_ready_is_killed_and_counts_as_a_crash(rig: Rig) -> None:
    rig.do(SizeSet(DECODE, 1))
    assert KillWorker("decode-0") in rig.wait(START_LIMIT_S)
    assert rig.status(DECODE).num_crashes == 1
    assert "not ready" in rig.status(DECODE).last_failure


def test_emptying_both_pools_ends_with_no_member(rig: Rig) -> None:
    rig.ready(PREFILL, 2)
    rig.ready(DECODE, 2)
    rig.do(SizeSet(PREFILL, 0))
    rig.do(SizeSet(DECODE, 0))
    for worker_id in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert rig.do(WorkerEnded(worker_id, "")) == []
    assert rig.core.num_members == 0
    assert rig.core.next_deadline_s() is None


def begin(rig: Rig, sizes: dict[Role, int], *found: tuple[Role, str]) -> list[PoolEffect]:
    return rig.do(Begun(tuple(sizes.items()), found))


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
    core = PoolCore(GRACE_S, start_limit_s=3600.0)
    core.handle(SizeSet(DECODE, 1), 0.0)
    assert core.next_deadline_s() == 3600.0


class World:
    """Workers that start, crash, hang and drain at random. Fails when the core asks for something impossible."""

    def __init__(self, seed: int) -> None:
        self.rig, self.rng = Rig(), random.Random(seed)
        self.starting: set[str] = set()
        self.ready: set[str] = set()
        self.leaving: set[str] = set()

    @property
    def alive(self) -> set[str]:
        return self.starting | self.ready | self.leaving

    def perform(self, effects: list[PoolEffect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker(_, worker_id):
                    assert worker_id not in self.alive
                    self.starting.add(worker_id)
                case DrainWorker(worker_id, _) | KillWorker(worker_id):
                    assert worker_id in self.alive
                    self.starting.discard(worker_id)
                    self.ready.discard(worker_id)
                    self.leaving.add(worker_id)

    def end(self, worker_id: str, reason: str) -> None:
        for group in (self.starting, self.ready, self.leaving):
            group.discard(worker_id)
        self.perform(self.rig.do(WorkerEnded(worker_id, reason)))

    def get_ready(self, worker_id: str) -> None:
        self.starting.discard(worker_id)
        self.ready.add(worker_id)
        self.perform(self.rig.do(WorkerReady(worker_id)))

    def step(self) -> None:
        """One random thing."""
        rng, choice = self.rng, self.rng.randrange(4)
        if choice == 0:
            self.perform(self.rig.do(SizeSet(rng.choice([PREFILL, DECODE]), rng.randint(0, 4))))
        elif choice == 1 and self.starting:
            self.get_ready(rng.choice(sorted(self.starting)))
        elif choice == 2 and self.alive:
            self.end(rng.choice(sorted(self.alive)), rng.choice(["", "crash"]))
        else:
            self.perform(self.rig.wait(rng.uniform(0, 40)))

    def behave(self) -> None:
        """From now on everybody does what is asked."""
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
        status = world.rig.status(role)
        assert (status.ready, status.starting, status.draining) == (status.desired, 0, 0)
