"""What a decode worker says that it holds."""

from tests.core_bench import attempt, tokens
from tests.decode_worker.harness import Bench, job


def test_holdings_follow_an_attempt_from_its_reservation_to_its_end() -> None:
    bench = Bench()
    work = job("a", tokens(20))
    bench.reserve(work)
    (reserved,) = bench.core.holders(bench.now_s)
    assert (reserved.attempt_id, reserved.phase) == (attempt("a"), "reserved")
    assert reserved.num_blocks == bench.pool.num_blocks_for(20)
    bench.deliver(work)
    (ready,) = bench.core.holders(bench.now_s)
    assert ready.phase == "ready"
    bench.run_all()
    assert bench.core.holders(bench.now_s) == []


def test_a_sequence_that_ended_during_a_step_holds_its_blocks_until_the_step_is_over() -> None:
    bench = Bench()
    work = job("a", tokens(20))
    bench.start(work)
    bench.cancel("a")
    (ended,) = bench.core.holders(bench.now_s)
    assert ended.phase == "ended, in a step"
    assert ended.num_blocks > 0
    bench.step()
    assert bench.core.holders(bench.now_s) == []
