"""How attempts end at the decode core: cancels, failures, deadlines, drains."""

import itertools

import pytest

from common.engine.contract.executor import StepFailed, StepFinished
from common.engine.contract.plan import StepResult
from common.values.errors import InvalidTransition
from common.values.ids import RouterId, TransferId
from common.values.messages import (
    AttemptFailed,
    Cancel,
    Granted,
    Prefill,
    Refused,
    WorkerState,
)
from common.values.request import SampledToken
from common.worker.events import Drained, DrainRequested, MessageReceived, RouterLost, RunStep, SendToRouter
from kvtransfer.events import FinishAnnounced, FirstToken
from tests.core_bench import ROUTER, attempt, tokens
from tests.decode_worker.harness import PREFILL, Bench, job
from tests.simkit.fake_engine import expected_output


def refusal(bench: Bench, name: str) -> tuple[str, bool]:
    message = bench.messages(name)[-1]
    assert isinstance(message, Refused)
    return message.reason, message.is_retryable


# ---- ends -------------------------------------------------------------------------------------------


def test_cancel_of_a_reservation_keeps_blocks_until_the_receiver_lets_go() -> None:
    bench = Bench()
    bench.receiver.is_writing = True
    bench.reserve(job("a", tokens(40)))
    bench.cancel("a")
    assert bench.counts() == (0, 3)
    bench.reserve(job("a", tokens(40)))
    assert refusal(bench, "a") == ("the same attempt is still ending", True)
    bench.cancel("a")
    bench.finish_writing("a")
    assert bench.counts() == (0, 0)


def test_cancel_during_a_step_keeps_blocks_until_it_ends() -> None:
    bench = Bench()
    bench.start(job("a", tokens(40)))
    assert bench.cancel("a") == []
    assert bench.counts() == (3, 0)
    num_told = len(bench.sent)
    bench.step()
    assert bench.counts() == (0, 0)
    assert bench.sent[num_told:] == []


@pytest.mark.parametrize("order", list(itertools.permutations(["cancel", "received", "cancel again", "deadline"])))
def test_late_signals_in_every_order_free_each_block_once(order: tuple[str, ...]) -> None:
    bench = Bench()
    work = job("a", tokens(40))
    bench.reserve(work)
    for signal in order:
        match signal:
            case "received":
                bench.handle(
                    FinishAnnounced(PREFILL, TransferId(attempt("a"), 0), 4, (FirstToken(0, SampledToken(1)),))
                )
            case "deadline":
                bench.advance(600.0)
            case _:
                bench.cancel("a")
    bench.run_all()
    assert bench.counts() == (0, 0)
    assert bench.core.next_deadline_s() is None


def test_lost_router_cancels_all_of_its_attempts_and_no_others() -> None:
    bench = Bench()
    bench.receiver.is_writing = True
    bench.reserve(job("a", tokens(40)))
    work = job("b", tokens(40, first=200))
    bench.reserve(work, router_id=RouterId("other"))
    bench.deliver(work)
    bench.start(job("c", tokens(40, first=400)))
    bench.handle(RouterLost(ROUTER))
    bench.handle(RouterLost(ROUTER))
    bench.run_all()
    bench.finish_writing("a")
    assert bench.output("b") == expected_output(work, 0)
    assert len(bench.output("c")) < 8
    assert bench.counts() == (0, 0)


def test_row_that_is_not_finite_fails_its_attempt_alone_and_is_never_hit_again() -> None:
    bench = Bench()
    bench.start(job("a", tokens(40), choices=(0, 1)))
    good = job("b", tokens(40, first=500))
    bench.start(good)
    bench.step()
    assert bench.plan is not None
    bench.runner.nan_sequences = {1}
    bench.run_all()
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), "logits are not finite", False)
    assert bench.output("b") == expected_output(good, 0)
    bench.reserve(job("c", tokens(40)))
    assert bench.messages("c") == [Granted(attempt("c"), 0, is_local=False)]


def test_tokens_of_the_step_that_fails_an_attempt_are_not_told() -> None:
    bench = Bench()
    bench.start(job("a", tokens(40), choices=(0, 1)))
    bench.step()
    num_events = len(list(bench.events("a")))
    bench.runner.nan_sequences = {2}
    bench.step()
    assert isinstance(bench.sent[-1], AttemptFailed)
    assert len(list(bench.events("a"))) == num_events


def test_failed_step_fails_its_attempts_retryable_and_the_worker_goes_on() -> None:
    bench = Bench()
    bench.start(job("a", tokens(40), choices=(0, 1)))
    bench.reserve(job("waits", tokens(40, first=300)))
    bench.step()
    plan, bench.plan = bench.plan, None
    assert plan is not None
    bench.handle(StepFailed(plan.step_id, "RuntimeError"))
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), "step failed: RuntimeError", True)
    assert bench.counts() == (0, 3)
    work = job("b", tokens(40))
    bench.start(work)
    bench.run_all()
    assert bench.output("b") == expected_output(work, 0)


def test_draining_refuses_finishes_and_reports_once() -> None:
    bench = Bench()
    work = job("a", tokens(40))
    bench.reserve(work)
    bench.handle(DrainRequested(10.0))
    assert bench.core.stats(bench.now_s).state is WorkerState.DRAINING
    bench.reserve(job("b", tokens(10)))
    assert refusal(bench, "b") == ("draining", True)
    bench.deliver(work)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    bench.advance(100.0)
    assert bench.effects.count(Drained()) == 1


def test_what_is_left_at_the_end_of_the_grace_fails_retryable() -> None:
    bench = Bench()
    bench.start(job("a", tokens(40)))
    bench.reserve(job("b", tokens(40, first=300)))
    bench.handle(DrainRequested(1.0))
    assert bench.core.next_deadline_s() == bench.now_s + 1.0
    effects = bench.advance(1.0)
    assert effects[-1] == Drained()
    assert [bench.messages(name)[-1] for name in "ab"] == [
        AttemptFailed(attempt(name), "draining", True) for name in "ab"
    ]
    bench.run_all()
    assert bench.counts() == (0, 0)
    assert bench.effects.count(Drained()) == 1


def test_local_events_out_of_place_raise_with_the_history() -> None:
    bench = Bench()
    for event in (StepFinished(StepResult(1, (), 0.1)), StepFailed(1, "x")):
        with pytest.raises(InvalidTransition, match="history"):
            bench.core.handle(event, bench.now_s)
    with pytest.raises(InvalidTransition, match="Prefill"):
        prefill = Prefill(job("a", tokens(4)), 0, PREFILL, "", 0)
        bench.core.handle(MessageReceived(ROUTER, prefill), bench.now_s)  # type: ignore[arg-type]


def test_cancel_of_something_unknown_is_ignored() -> None:
    bench = Bench()
    assert bench.handle(MessageReceived(ROUTER, Cancel(attempt("nobody")))) == []


def test_stats_count_what_there_is() -> None:
    bench = Bench(budget=16, max_num_seqs=2)
    bench.start(job("a", tokens(40)))
    bench.reserve(job("held", tokens(40, first=300)))
    bench.reserve(job("local", tokens(40, first=500)), local=64)
    bench.reserve(job("waits", tokens(40, first=700)), local=64)
    bench.step(seconds=0.1)
    stats = bench.core.stats(bench.now_s)
    assert (stats.num_running, stats.num_waiting, stats.num_held_attempts) == (2, 1, 1)
    assert stats.num_waiting_uncached_tokens == 80
    assert (stats.kv_blocks_used, stats.kv_blocks_held) == (9, 3)


def test_run_step_is_decided_before_tokens_are_told() -> None:
    """The device starts before messages are encoded."""
    bench = Bench()
    bench.start(job("a", tokens(40)))
    kinds = [type(effect) for effect in bench.step()]
    assert kinds == [RunStep, SendToRouter]


def test_no_block_leaks_over_requests_of_every_length() -> None:
    bench = Bench(num_blocks=20)
    for i in range(500):
        work = job(f"r{i}", tokens(i % 130 + 1), max_tokens=i % 20 + 1)
        bench.start(work)
        bench.run_all()
        if i % 25 == 0:
            assert bench.output(f"r{i}") == expected_output(work, 0)
            stats = bench.pool.stats()
            assert stats.cached + stats.free == stats.total
