"""Who is in the batch, who gets blocks, who is preempted; and that tokens do not notice."""

import pytest

from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.values.messages import Granted, HandoffReport, Refused
from common.values.request import SamplingParams, Work
from tests.core_bench import attempt, tokens
from tests.decode_worker.harness import Bench, job
from tests.simkit.fake_engine import expected_output


def works(num: int, length: int, max_tokens: int) -> list[Work]:
    return [job(f"r{i}", tokens(length, first=1000 * i), max_tokens) for i in range(num)]


def assert_exact(bench: Bench, *expected: Work) -> None:
    """Each choice has its tokens, once each (`output` checks positions), and nothing is left behind."""
    for work in expected:
        for choice in work.choices:
            assert bench.output(work.attempt_id.request_id, choice) == expected_output(work, choice)
    assert bench.counts() == (0, 0)


def test_sequences_join_and_leave_at_every_step() -> None:
    bench = Bench()
    first, second, third = (
        job("a", tokens(20), 3),
        job("b", tokens(20, first=100), 6),
        job("c", tokens(20, first=200), 2),
    )
    bench.start(first)
    bench.start(second)
    bench.step()
    assert bench.scheduled() == {1: 1, 2: 1}
    bench.start(third)
    bench.step()
    assert bench.scheduled() == {2: 1, 3: 1}
    bench.run_all()
    assert_exact(bench, first, second, third)


def test_a_block_is_taken_only_when_the_previous_one_is_full() -> None:
    bench = Bench(block_size=4)
    bench.start(job("a", tokens(4), max_tokens=9))
    used = [bench.counts()[0]]
    while bench.plan is not None:
        bench.step()
        used.append(bench.counts()[0])
    assert used == [2, 2, 2, 2, 3, 3, 3, 3, 0]


def test_step_has_no_more_sequences_than_allowed_and_the_rest_follow() -> None:
    bench = Bench(max_num_seqs=3, max_num_waiting=10)
    jobs = works(7, 20, 5)
    for work in jobs:
        bench.start(work)
    while bench.plan is not None:
        assert len(bench.plan.sequences) <= 3
        bench.step()
    assert_exact(bench, *jobs)


def test_running_streams_go_on_while_a_long_prompt_is_prefilled_in_the_rest_of_the_budget() -> None:
    bench = Bench(budget=16)
    streams = works(3, 20, 12)
    for work in streams:
        bench.start(work)
    bench.step()
    long = job("long", tokens(60, first=9000), max_tokens=3)
    bench.reserve(long, local=64)
    bench.step()
    num_steps = 0
    while bench.plan is not None and 4 in bench.scheduled():
        assert [bench.scheduled()[i] for i in (1, 2, 3)] == [1, 1, 1]
        assert sum(bench.scheduled().values()) <= 16
        num_steps += 1
        bench.step()
    assert num_steps >= 60 // 13
    bench.run_all()
    assert_exact(bench, long, *streams)


def test_budget_below_max_num_seqs_still_leaves_room_for_a_prefill() -> None:
    bench = Bench(budget=4, max_num_seqs=8, max_num_waiting=8)
    jobs = works(4, 8, 6)
    for work in jobs[:3]:
        bench.start(work)
    bench.reserve(jobs[3], local=64)
    while bench.plan is not None:
        assert bench.plan.num_tokens <= 4
        bench.step()
    assert_exact(bench, *jobs)


# ---- too few blocks ---------------------------------------------------------------------------------


def test_two_growing_sequences_in_a_pool_for_one_and_a_half_both_finish() -> None:
    """Pool of 8 blocks, two prompts of 3 blocks that grow to 6."""
    bench = Bench(num_blocks=8, block_size=4)
    jobs = works(2, 12, 13)
    for work in jobs:
        bench.start(work)
    bench.run_all()
    assert bench.core.stats(bench.now_s).num_preemptions >= 1
    assert_exact(bench, *jobs)


def test_preempted_sequence_is_computed_again_here_and_repeats_nothing() -> None:
    """No second transfer is asked for; the client sees each position once."""
    bench = Bench(num_blocks=8, block_size=4, budget=64)
    jobs = works(2, 12, 13)
    for work in jobs:
        bench.start(work)
    bench.run_all()
    assert [type(message) for message in bench.messages("r1")] == [Granted, HandoffReport]
    assert bench.receiver.expected == {}
    assert_exact(bench, *jobs)


def test_recompute_of_a_preempted_sequence_is_chunked() -> None:
    bench = Bench(num_blocks=12, block_size=4, budget=3)
    jobs = works(2, 12, 24)
    for work in jobs:
        bench.start(work)
    while bench.plan is not None:
        assert bench.plan.num_tokens <= 3
        bench.step()
    assert bench.core.stats(bench.now_s).num_preemptions >= 1
    assert_exact(bench, *jobs)


def test_the_youngest_is_preempted() -> None:
    bench = Bench(num_blocks=9, block_size=4)
    jobs = works(3, 8, 13)
    for work in jobs:
        bench.start(work)
    while bench.core.stats(bench.now_s).num_preemptions == 0:
        bench.step()
    assert set(bench.scheduled()) == {1, 2}
    bench.run_all()
    assert_exact(bench, *jobs)


def test_lower_priority_is_preempted_before_younger_ones() -> None:
    bench = Bench(num_blocks=9, block_size=4)
    jobs = [job(f"r{i}", tokens(8, first=1000 * i), 13, priority=5 if i == 0 else 0) for i in range(3)]
    for work in jobs:
        bench.start(work)
    while bench.core.stats(bench.now_s).num_preemptions == 0:
        bench.step()
    assert set(bench.scheduled()) == {2, 3}
    bench.run_all()
    assert_exact(bench, *jobs)


def test_reservation_in_transfer_is_never_preempted() -> None:
    """The pool is full and the only other blocks are in a transfer: the stream waits, the transfer completes."""
    bench = Bench(num_blocks=7, block_size=4)
    running, coming = job("a", tokens(12), max_tokens=13), job("b", tokens(12, first=500), max_tokens=4)
    bench.reserve(coming)
    bench.start(running)
    bench.run_all()
    assert 0 < len(bench.output("a")) < 13
    assert bench.counts() == (4, 3)
    bench.deliver(coming)
    bench.run_all()
    assert_exact(bench, running, coming)


def test_stream_that_waits_for_a_lost_reservation_goes_on_at_its_timeout() -> None:
    bench = Bench(num_blocks=7, block_size=4, reservation_timeout_s=30.0)
    running = job("a", tokens(12), max_tokens=13)
    bench.reserve(job("b", tokens(12, first=500), max_tokens=4))
    bench.start(running)
    bench.run_all()
    assert bench.plan is None
    assert 0 < len(bench.output("a")) < 13
    bench.advance(30.0)
    bench.run_all()
    assert_exact(bench, running)


def test_many_reservations_of_a_stalled_prefill_worker_all_finish_when_it_resumes() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    jobs = works(4, 8, 9)
    for work in jobs:
        bench.reserve(work)
    assert bench.counts() == (0, 8)
    for work in jobs:
        bench.deliver(work)
    bench.run_all()
    assert_exact(bench, *jobs)


def test_older_sequence_that_waits_for_the_only_slot_gets_it() -> None:
    """One slot; the younger stream runs first, needs a block, and only the older one's could be had."""
    bench = Bench(num_blocks=7, block_size=4, max_num_seqs=1)
    older, younger = job("old", tokens(12), max_tokens=8), job("young", tokens(12, first=500), max_tokens=13)
    bench.reserve(older)
    bench.start(younger)
    bench.deliver(older)
    bench.run_all()
    assert_exact(bench, older, younger)


def test_newcomers_do_not_take_the_blocks_that_a_preempted_sequence_waits_for() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    jobs = works(2, 12, 13)
    for work in jobs:
        bench.start(work)
    while bench.core.stats(bench.now_s).num_preemptions == 0:
        bench.step()
    assert bench.pool.num_available >= 1
    bench.reserve(job("new", tokens(2, first=7000), max_tokens=2))
    assert bench.messages("new") == [Refused(attempt("new"), "no blocks", is_retryable=True)]
    bench.run_all()
    assert_exact(bench, *jobs)


def test_newcomers_leave_running_sequences_a_block_to_grow() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    bench.start(job("a", tokens(12), max_tokens=2))
    bench.reserve(job("b", tokens(16, first=500), max_tokens=2))
    assert isinstance(bench.messages("b")[-1], Refused)
    bench.reserve(job("c", tokens(12, first=500), max_tokens=2))
    assert isinstance(bench.messages("c")[-1], Granted)


def test_empty_worker_admits_whatever_fits() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    work = job("a", tokens(32), max_tokens=1)
    bench.start(work)
    assert_exact(bench, work)


@pytest.mark.parametrize("local", [0, 64])
def test_one_choice_at_a_time_when_the_pool_holds_only_one(local: int) -> None:
    bench = Bench(num_blocks=5, block_size=4)
    work = job("a", tokens(10), max_tokens=11, choices=(0, 1, 2))
    bench.reserve(work, local)
    if not local:
        bench.deliver(work)
    bench.run_all()
    assert_exact(bench, work)


def test_preempted_fork_shares_the_prompts_full_blocks_again() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    work = job("a", tokens(18), max_tokens=16, choices=(0, 1, 2))
    bench.start(work)
    bench.run_all()
    assert bench.core.stats(bench.now_s).num_preemptions >= 1
    assert_exact(bench, work)


def test_preempted_with_penalties_and_stop_tokens_is_token_exact() -> None:
    sampling = SamplingParams(seed=9, max_tokens=13, frequency_penalty=0.3, min_tokens=6, stop_token_ids=(1, 2, 3, 4))
    jobs = [job(f"r{i}", tokens(12, first=1000 * i), sampling=sampling) for i in range(3)]
    bench = Bench(num_blocks=12, block_size=4)
    for work in jobs:
        bench.start(work)
    bench.run_all()
    assert_exact(bench, *jobs)


def test_cancel_of_a_preempted_sequence_leaves_nothing() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    jobs = works(2, 12, 13)
    for work in jobs:
        bench.start(work)
    while bench.core.stats(bench.now_s).num_preemptions == 0:
        bench.step()
    bench.cancel("r1")
    bench.run_all()
    assert_exact(bench, jobs[0])


class ScarcePool(BlockPool):
    """Has no block for the next `num_failures` requests, whatever it holds."""

    num_failures = 0

    @property
    def num_available(self) -> int:
        if self.num_failures > 0:
            self.num_failures -= 1
            return 0
        return super().num_available


@pytest.mark.parametrize("num_failures", [1, 5])
def test_exhaustion_is_an_answer_not_an_error(num_failures: int) -> None:
    """Eight sequences run; the pool says no some times in a row; no request fails and no tokens change."""
    pool = ScarcePool(64, 4)
    bench = Bench(groups=[PoolGroup(pool)], max_num_waiting=0)
    jobs = works(8, 7, 12)
    for work in jobs:
        bench.start(work)
    bench.step()
    pool.num_failures = num_failures
    bench.run_all()
    assert pool.num_failures == 0
    assert_exact(bench, *jobs)
    assert all(len(bench.messages(work.attempt_id.request_id)) == 2 for work in jobs)


def test_a_tenants_flood_leaves_the_next_slot_to_another_tenant() -> None:
    """However many wait, and whatever priority they have among themselves."""
    bench = Bench(num_blocks=512, max_num_seqs=2, max_num_waiting=40)
    for i in range(12):
        bench.start(job(f"flood{i}", tokens(20, first=1000 * i), 3 + i % 3, priority=-1, tenant="a"))
    bench.step()
    bench.start(job("other", tokens(20, first=90_000), 2, tenant="b"))
    num_steps = 0
    while not bench.events("other"):
        bench.step()
        num_steps += 1
    assert num_steps <= 6, "it waits for a slot to be free, not for the flood"
    bench.run_all()
    assert bench.counts() == (0, 0)
