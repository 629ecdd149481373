"""The pool core: events in, effects out."""

import pytest

from common.values.messages import Role
from deploy.scaling.pool_members import MAX_BACKOFF_S, Identity
from deploy.scaling.pools import (
    KILL_MARGIN_S,
    STABLE_AFTER_S,
    START_LIMIT_S,
    Begun,
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolLimits,
    StartWorker,
    WorkerEnded,
    WorkerReady,
)
from tests.deploy.scaling.pool_rig import DECODE, GRACE_S, PREFILL, Rig, size


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
