"""What the prefill core refuses, and how its requests end."""

import itertools

import pytest

from common.engine.contract.executor import LayerComputed, StepFailed, StepFinished
from common.engine.contract.plan import StepResult
from common.values.errors import InvalidTransition
from common.values.ids import RouterId
from common.values.messages import AttemptFailed, Cancel, FirstTokens, Refused, Reserve, WorkerState
from common.worker.events import Drained, DrainRequested, MessageReceived, RouterLost, SendToRouter
from kvtransfer.events import (
    TransferCancelRequested,
)
from tests.core_bench import ROUTER, attempt, tokens
from tests.prefill_worker.harness import Bench, failed_result, prompt

# ---- refusals ---------------------------------------------------------------------------------------


def refusal(bench: Bench, name: str) -> tuple[str, bool]:
    (message,) = bench.messages(name)
    assert isinstance(message, Refused)
    assert message.prefill_try == 0
    return message.reason, message.is_retryable


def test_what_can_never_fit_is_refused_for_good() -> None:
    bench = Bench(num_blocks=16)
    bench.prefill(prompt("a", tokens(257)))
    reason, is_retryable = refusal(bench, "a")
    assert "257" in reason
    assert not is_retryable
    bench.prefill(prompt("b", tokens(256)))
    bench.run_all()
    assert isinstance(bench.messages("b")[0], FirstTokens)


@pytest.mark.parametrize("first_missing_token", [-1, 10, 11])
def test_nonsense_of_the_router_is_refused_for_good(first_missing_token: int) -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(10), first_missing_token=first_missing_token))
    assert not refusal(bench, "a")[1]


def test_a_full_queue_refuses_for_now_and_admitted_work_goes_on() -> None:
    bench = Bench(max_num_seqs=1, max_num_waiting=2)
    for i in range(4):
        bench.prefill(prompt(f"r{i}", tokens(10, first=100 * i)))
    assert refusal(bench, "r3") == ("queue full", True)
    bench.run_all()
    assert all(isinstance(bench.messages(f"r{i}")[0], FirstTokens) for i in range(3))


def test_draining_refuses_finishes_and_reports_once() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100)))
    bench.handle(DrainRequested(10.0))
    bench.prefill(prompt("b", tokens(10)))
    assert refusal(bench, "b") == ("draining", True)
    assert bench.core.stats(bench.now_s).state is WorkerState.DRAINING
    bench.run_all()
    assert Drained() not in bench.effects
    bench.acknowledge("a")
    assert (
        bench.effects[-2:] == [SendToRouter(ROUTER, bench.first_tokens("a")), Drained()] or Drained() in bench.effects
    )
    bench.advance(100.0)
    assert bench.effects.count(Drained()) == 1


def test_idle_worker_is_drained_at_once() -> None:
    bench = Bench()
    assert bench.handle(DrainRequested(10.0)) == [Drained()]


def test_what_is_left_at_the_end_of_the_grace_fails_retryable() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100)))
    bench.handle(DrainRequested(1.0))
    assert bench.core.next_deadline_s() == bench.now_s + 1.0
    effects = bench.advance(1.0)
    assert effects == [SendToRouter(ROUTER, AttemptFailed(attempt("a"), "draining", True, 0)), Drained()]
    bench.step()
    assert bench.counts() == (0, 0)


# ---- ends -------------------------------------------------------------------------------------------


def test_cancel_while_waiting_leaves_nothing() -> None:
    bench = Bench(max_num_seqs=1)
    bench.prefill(prompt("a", tokens(10)))
    bench.prefill(prompt("b", tokens(10, first=50)))
    assert bench.cancel("b") == []
    bench.run_all()
    assert bench.messages("b") == []
    bench.acknowledge("a")
    assert bench.counts() == (0, 0)


def test_cancel_during_a_step_keeps_blocks_until_it_ends() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100)))
    bench.cancel("a")
    assert bench.counts() == (7, 0)
    assert isinstance(bench.sender.events[-1], TransferCancelRequested)
    bench.step()
    assert bench.counts() == (0, 0)
    assert bench.messages("a") == []


def test_cancel_keeps_blocks_until_the_transfer_ends() -> None:
    bench = Bench()
    bench.sender.is_packing = True
    bench.prefill(prompt("a", tokens(100)))
    bench.cancel("a")
    bench.step()
    assert bench.counts() == (0, 7)
    bench.lose_transfer("a")
    assert bench.counts() == (0, 0)


def test_cancel_of_some_choices_goes_on_until_all_are_cancelled() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100), choices=(0, 1)))
    bench.cancel("a", (1,))
    assert bench.counts() == (7, 0)
    assert len(bench.sender.active) == 1
    bench.cancel("a", (0,))
    assert len(bench.sender.active) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["cancel", "sent", "sent again", "deadline"])))
def test_late_signals_in_every_order_free_each_block_once(order: tuple[str, ...]) -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(64)))
    bench.run_all()
    for signal in order:
        match signal:
            case "cancel":
                bench.cancel("a")
            case "deadline":
                bench.advance(60.0)
            case _:
                bench.acknowledge("a")
    assert bench.counts() == (0, 0)
    assert len(bench.messages("a")) == 1
    assert bench.core.next_deadline_s() is None


def test_deadline_fails_the_request_for_good() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100), deadline_s=5.0))
    assert bench.core.next_deadline_s() == bench.now_s + 5.0
    bench.advance(5.0)
    assert bench.messages("a") == [AttemptFailed(attempt("a"), "deadline", False, 0)]
    bench.step()
    assert bench.counts() == (0, 0)
    assert bench.plan is None


def test_deadline_after_the_first_tokens_says_nothing_more() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(10), deadline_s=5.0))
    bench.step()
    bench.advance(5.0)
    assert len(bench.messages("a")) == 1
    assert bench.counts() == (0, 0)


def test_lost_router_cancels_all_of_its_requests_and_no_others() -> None:
    bench = Bench(budget=32)
    bench.prefill(prompt("a", tokens(100)))
    bench.prefill(prompt("b", tokens(100, first=500)), RouterId("other"))
    bench.prefill(prompt("c", tokens(20)))
    bench.handle(RouterLost(ROUTER))
    bench.run_all()
    assert bench.messages("a") == bench.messages("c") == []
    assert isinstance(bench.messages("b")[0], FirstTokens)


def test_transfer_that_fails_while_computing_aborts_the_computation() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(200)))
    bench.lose_transfer("a")
    assert bench.messages("a") == [AttemptFailed(attempt("a"), "transfer: cancelled scripted", True, 0)]
    bench.step()
    assert bench.plan is None
    assert bench.counts() == (0, 0)


def test_transfer_that_fails_at_its_start_is_an_ordinary_failure() -> None:
    bench = Bench()
    bench.sender.ends_at_start = True
    bench.prefill(prompt("a", tokens(20)))
    assert bench.messages("a") == [AttemptFailed(attempt("a"), "transfer: link_lost scripted", True, 0)]
    bench.run_all()
    assert bench.counts() == (0, 0)


def test_transfer_that_fails_after_the_first_tokens_is_the_decode_sides_news() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(20)))
    bench.run_all()
    assert bench.lose_transfer("a") == []
    assert bench.counts() == (0, 0)


def test_link_that_is_lost_after_the_first_tokens_is_told_as_the_decode_side_may_never_have_heard_of_it() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(20)))
    bench.run_all()
    bench.lose_link()
    assert bench.messages("a")[1:] == [AttemptFailed(attempt("a"), "transfer: link_lost scripted", True, 0)]
    assert bench.counts() == (0, 0)


def test_row_that_is_not_finite_fails_alone_and_is_never_hit_again() -> None:
    """Nor are the blocks of its earlier chunks: the trouble may lie there."""
    bench = Bench(budget=64)
    bench.prefill(prompt("a", tokens(100)))
    bench.prefill(prompt("b", tokens(100, first=500)))
    bench.runner.nan_sequences = {1}
    bench.run_all()
    assert bench.messages("a") == [AttemptFailed(attempt("a"), "logits are not finite", False, 0)]
    assert isinstance(bench.messages("b")[0], FirstTokens)
    bench.runner.nan_sequences = set()
    bench.prefill(prompt("c", tokens(100)))
    bench.run_all()
    assert bench.first_tokens("c").num_cached_tokens == 0


def test_failed_step_fails_its_requests_and_the_worker_goes_on() -> None:
    bench = Bench(max_num_seqs=2)
    for name, first in (("a", 0), ("b", 200), ("c", 400)):
        bench.prefill(prompt(name, tokens(30, first=first)))
    bench.step()
    assert bench.plan is not None
    plan, bench.plan = bench.plan, None
    bench.handle(StepFailed(plan.step_id, "OutOfMemoryError"))
    assert bench.messages("b") == [AttemptFailed(attempt("b"), "step failed: OutOfMemoryError", True, 0)]
    bench.run_all()
    bench.prefill(prompt("b2", tokens(30, first=200)))
    bench.run_all()
    assert bench.first_tokens("b2").num_cached_tokens == 0


def test_newer_try_replaces_the_old_one() -> None:
    bench = Bench()
    bench.sender.is_packing = True
    bench.prefill(prompt("a", tokens(100), prefill_try=0))
    bench.prefill(prompt("a", tokens(100), prefill_try=1))
    bench.run_all()
    (first,) = bench.messages("a")
    assert isinstance(first, FirstTokens)
    assert first.prefill_try == 1
    bench.lose_transfer("a", 0)
    bench.acknowledge("a", 1)
    assert bench.counts() == (0, 0)


def test_old_or_equal_try_is_ignored() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(100), prefill_try=1))
    assert bench.prefill(prompt("a", tokens(100), prefill_try=1)) == []
    assert bench.prefill(prompt("a", tokens(100), prefill_try=0)) == []
    bench.run_all()
    assert bench.first_tokens("a").prefill_try == 1


def test_same_try_again_while_it_is_ending_is_refused_for_now() -> None:
    bench = Bench()
    bench.sender.is_packing = True
    bench.prefill(prompt("a", tokens(100)))
    bench.cancel("a")
    bench.prefill(prompt("a", tokens(100)))
    assert refusal(bench, "a")[1]
    bench.run_all()
    bench.lose_transfer("a")
    assert bench.counts() == (0, 0)


def test_local_events_out_of_place_raise_with_the_history() -> None:
    bench = Bench()
    for event in (StepFinished(StepResult(1, (), 0.1)), StepFailed(1, "x"), LayerComputed(1, 1)):
        with pytest.raises(InvalidTransition, match="history"):
            bench.core.handle(event, bench.now_s)
    bench.prefill(prompt("a", tokens(100)))
    with pytest.raises(InvalidTransition, match="DrainRequested"):
        bench.handle(DrainRequested(1.0))
        bench.core.handle(LayerComputed(7, 1), bench.now_s)
    with pytest.raises(InvalidTransition, match="MessageReceived"):
        bench.core.handle(MessageReceived(ROUTER, Reserve(prompt("a", tokens(4)).work)), bench.now_s)


def test_cancel_of_something_unknown_is_ignored() -> None:
    bench = Bench()
    assert bench.handle(MessageReceived(ROUTER, Cancel(attempt("nobody")))) == []


def test_stats_count_what_there_is() -> None:
    bench = Bench(budget=64, max_num_seqs=1)
    bench.prefill(prompt("a", tokens(64)))
    bench.prefill(prompt("b", tokens(64) + tokens(100, first=300)))
    bench.step(seconds=0.1)
    stats = bench.core.stats(bench.now_s)
    assert (stats.num_running, stats.num_waiting, stats.num_held_attempts) == (1, 0, 1)
    assert stats.num_waiting_uncached_tokens == 100 - 64
    assert (stats.kv_blocks_used, stats.kv_blocks_held) == (11, 0)
    assert stats.prefill_tokens_per_s == pytest.approx(1000.0)
    bench.run_all()
    assert bench.core.stats(bench.now_s).num_waiting_uncached_tokens == 0


def test_no_block_leaks_over_requests_of_every_length() -> None:
    bench = Bench(num_blocks=20, budget=48)
    for i in range(500):
        bench.prefill(prompt(f"r{i}", tokens(i % 130 + 1)))
        bench.run_all()
        bench.acknowledge(f"r{i}")
        if i % 25 == 0:
            stats = bench.pool.stats()
            assert stats.cached + stats.free == stats.total


def test_result_row_of_a_request_cancelled_during_the_step_is_dropped() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(10)))
    assert bench.plan is not None
    plan, bench.plan = bench.plan, None
    bench.cancel("a")
    assert bench.handle(StepFinished(failed_result(plan, set()))) == []
    assert bench.counts() == (0, 0)
