"""What a prefill worker says that it holds."""

from tests.core_bench import attempt, tokens
from tests.prefill_worker.harness import Bench, prompt


def test_holdings_follow_a_request_from_its_blocks_to_their_release() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(20)))
    (running,) = bench.core.holders(bench.now_s)
    assert (running.attempt_id, running.phase, running.prefill_try) == (attempt("a"), "running", 0)
    assert running.num_blocks == bench.pool.num_blocks_for(20)
    bench.run_all()
    (computed,) = bench.core.holders(bench.now_s)
    assert computed.phase == "computed"
    assert computed.age_s > 0
    assert computed.time_left_s < running.time_left_s
    bench.acknowledge("a")
    assert bench.core.holders(bench.now_s) == []


def test_a_prompt_that_ended_during_a_step_holds_its_blocks_until_the_step_is_over() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(20)))
    bench.cancel("a")
    (ended,) = bench.core.holders(bench.now_s)
    assert (ended.phase, ended.num_blocks) == ("ended, in a step", bench.pool.num_blocks_for(20))
    bench.step()
    assert bench.core.holders(bench.now_s) == []
