"""The decode core, claim by claim."""

import itertools

import pytest

from common.engine.plan import StepResult
from common.errors import InvalidTransition
from common.ids import RouterId, TransferId
from common.messages import (
    AttemptFailed,
    Cancel,
    Granted,
    HandoffReport,
    Prefill,
    Refused,
    TokenBatch,
    TransferFailed,
    WorkerState,
)
from common.request import FinishReason, SampledToken, SamplingParams
from decode_worker.events import (
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)
from kvtransfer.events import ChunkAnnounced, FinishAnnounced, FirstToken
from tests.decode_worker.harness import CHUNK, PREFILL, ROUTER, Bench, attempt, job, tokens
from tests.simkit.fake_engine import expected_output


def test_one_attempt_from_reservation_to_last_token() -> None:
    bench = Bench()
    work = job("a", tokens(100), max_tokens=5)
    bench.reserve(work)
    assert bench.told == [Granted(attempt("a"), 0, is_local=False)]
    assert bench.counts() == (0, 7)
    bench.now_s += 1.0
    bench.deliver(work)
    assert bench.counts() == (7, 0)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    assert bench.finish_reason("a") is FinishReason.LENGTH
    assert bench.runner.num_steps == 4
    assert bench.counts() == (0, 0)
    assert bench.core.next_deadline_s() is None


def test_report_comes_once_just_before_the_first_tokens() -> None:
    bench = Bench()
    bench.start(job("a", tokens(20)))
    bench.run_all()
    kinds = [type(message) for message in bench.told]
    assert kinds[:3] == [Granted, HandoffReport, TokenBatch]
    assert kinds.count(HandoffReport) == 1
    assert bench.told[1] == HandoffReport(attempt("a"), 1000, 4, 0.5, 0.1, 0.0, 0, is_local=False)


def test_report_counts_the_time_until_the_attempt_joins_a_step() -> None:
    bench = Bench()
    bench.start(job("a", tokens(20)))
    bench.start(job("b", tokens(20, first=500)))
    assert list(bench.events("b")) == []
    bench.step(seconds=2.0)
    report = bench.messages("b")[-1]
    assert isinstance(report, HandoffReport)
    assert report.decode_queue_s == pytest.approx(2.0)


def test_one_token_batch_per_router_and_step() -> None:
    bench = Bench()
    for i in range(3):
        bench.start(job(f"r{i}", tokens(20, first=100 * i)))
    work = job("other", tokens(20, first=900))
    bench.reserve(work, router_id=RouterId("second"))
    bench.deliver(work)
    bench.step()
    sent = [effect for effect in bench.step() if isinstance(effect, SendToRouter)]
    assert sorted((effect.router_id, len(batch_of(effect).attempts)) for effect in sent) == [
        ("router", 3),
        ("second", 1),
    ]


def batch_of(effect: SendToRouter) -> TokenBatch:
    assert isinstance(effect.message, TokenBatch)
    return effect.message


def test_max_tokens_one_takes_no_decode_step() -> None:
    bench = Bench()
    work = job("a", tokens(20), max_tokens=1)
    bench.start(work)
    assert bench.output("a") == expected_output(work, 0)
    assert bench.finish_reason("a") is FinishReason.LENGTH
    assert bench.plan is None
    assert bench.counts() == (0, 0)


def test_stop_token_ends_the_choice_at_once() -> None:
    free = expected_output(job("a", tokens(20), max_tokens=8), 0)
    stop = free[4]
    work = job("a", tokens(20), sampling=SamplingParams(seed=1, max_tokens=8, stop_token_ids=(stop,)))
    bench = Bench()
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == free[: free.index(stop) + 1]
    assert bench.finish_reason("a") is FinishReason.STOP


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(5, 8), (8, 8)])
def test_stop_tokens_are_banned_until_min_tokens(min_tokens: int, max_tokens: int) -> None:
    stops = tuple(range(45))
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops)
    work = job("a", tokens(20), sampling=sampling)
    bench = Bench()
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    assert len(bench.output("a")) >= min_tokens
    assert not set(bench.output("a")[:min_tokens]) & set(stops)


def test_penalties_see_prompt_and_output_and_others_do_not_carry_them() -> None:
    bench = Bench()
    plain = job("a", tokens(20))
    work = job("b", tokens(20, first=300), sampling=SamplingParams(seed=1, max_tokens=6, presence_penalty=1.0))
    bench.start(plain)
    bench.start(work)
    bench.step()
    assert bench.plan is not None
    first, second = (sequence.samples[0] for sequence in bench.plan.sequences)
    assert first.token_ids == ()
    assert second.token_ids == (*work.token_ids, *expected_output(work, 0)[: second.position])
    bench.run_all()
    assert bench.output("b") == expected_output(work, 0)


def test_replay_continues_positions_and_does_not_renew_the_budget() -> None:
    """The client had 5 of 12 tokens when its decode worker died."""
    original = job("a", tokens(20), max_tokens=12)
    full = expected_output(original, 0)
    work = job("a", (*tokens(20), *full[:5]), max_tokens=12, number=1, num_prompt_tokens=20)
    bench = Bench()
    bench.start(work)
    bench.run_all()
    assert bench.output("a", number=1) == full[5:]
    assert [event.position for event in bench.events("a", 1)] == list(range(5, 12))


# ---- reservations -----------------------------------------------------------------------------------


def refusal(bench: Bench, name: str) -> tuple[str, bool]:
    message = bench.messages(name)[-1]
    assert isinstance(message, Refused)
    return message.reason, message.is_retryable


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [(300, 10, False), (200, 100, False), (200, 57, True)])
def test_what_can_never_fit_is_refused_for_good(length: int, max_tokens: int, fits: bool) -> None:
    bench = Bench(num_blocks=16)
    work = job("a", tokens(length), max_tokens)
    bench.reserve(work)
    if fits:
        bench.deliver(work)
        bench.run_all()
        assert bench.output("a") == expected_output(work, 0)
    else:
        assert not refusal(bench, "a")[1]
        assert bench.counts() == (0, 0)


def test_more_choices_than_the_worker_ever_takes_are_refused_for_good() -> None:
    bench = Bench(max_num_seqs=2, max_num_waiting=1)
    bench.reserve(job("a", tokens(10), choices=(0, 1, 2, 3)))
    assert not refusal(bench, "a")[1]


@pytest.mark.parametrize(
    "work", [job("a", ()), job("a", tokens(4), choices=()), job("a", tokens(9), 3, num_prompt_tokens=6)]
)
def test_nothing_to_generate_is_refused_for_good(work: object) -> None:
    bench = Bench()
    bench.reserve(work)  # type: ignore[arg-type]
    assert refusal(bench, "a") == ("nothing to generate", False)


def test_no_blocks_refuses_for_now() -> None:
    bench = Bench(num_blocks=10)
    bench.reserve(job("a", tokens(100)))
    bench.reserve(job("b", tokens(100, first=500), max_tokens=2))
    assert refusal(bench, "b") == ("no blocks", True)
    bench.cancel("a")
    bench.reserve(job("b", tokens(100, first=500), max_tokens=2))
    assert isinstance(bench.messages("b")[-1], Granted)


def test_admission_counts_blocks_not_tokens() -> None:
    bench = Bench(num_blocks=1)
    bench.reserve(job("a", tokens(2), max_tokens=2))
    bench.reserve(job("b", tokens(2, first=50), max_tokens=2))
    assert isinstance(bench.messages("a")[-1], Granted)
    assert refusal(bench, "b") == ("no blocks", True)


def test_queue_bound_counts_choices() -> None:
    bench = Bench(max_num_seqs=2, max_num_waiting=2)
    bench.reserve(job("a", tokens(10), choices=(0, 1, 2)))
    bench.reserve(job("b", tokens(10, first=50), choices=(0, 1)))
    assert refusal(bench, "b") == ("queue full", True)
    bench.reserve(job("c", tokens(10, first=90)))
    assert isinstance(bench.messages("c")[-1], Granted)


def test_prefix_hit_leaves_only_the_missing_tokens_and_never_the_last_one() -> None:
    bench = Bench()
    bench.start(job("a", tokens(64), max_tokens=2))
    bench.run_all()
    for name, length, cached in (("b", 64, 48), ("c", 65, 64), ("d", 70, 64)):
        work = job(name, tokens(length), max_tokens=3)
        bench.reserve(work)
        assert bench.messages(name) == [Granted(attempt(name), cached, is_local=False)]
        bench.deliver(work)
        bench.run_all()
        assert bench.output(name) == expected_output(work, 0)


def test_decoded_blocks_are_hit_by_the_next_turn() -> None:
    bench = Bench()
    work = job("a", tokens(20), max_tokens=30)
    bench.start(work)
    bench.run_all()
    history = (*tokens(20), *bench.output("a"))
    bench.reserve(job("b", (*history, 7, 8, 9)))
    assert bench.messages("b") == [Granted(attempt("b"), 48, is_local=False)]
    stored = [h for e in bench.effects if isinstance(e, PublishBlocks) for h in e.stored]
    assert len(stored) == len(set(stored)) == 3


def test_blocks_of_a_reservation_are_not_findable_before_their_kv_is_in() -> None:
    bench = Bench()
    bench.reserve(job("a", tokens(64)))
    bench.reserve(job("b", tokens(64)))
    assert bench.messages("b") == [Granted(attempt("b"), 0, is_local=False)]


def test_few_missing_tokens_are_prefilled_here() -> None:
    bench = Bench(budget=8)
    work = job("a", tokens(20), max_tokens=4)
    bench.reserve(work, local=20)
    assert bench.told[0] == Granted(attempt("a"), 0, is_local=True)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    report = bench.told[1]
    assert isinstance(report, HandoffReport)
    assert (report.is_local, report.num_bytes, report.decode_queue_s) == (True, 0, 0.0)
    assert report.local_prefill_s == pytest.approx(0.03)
    assert bench.receiver.expected == {}


@pytest.mark.parametrize(("missing", "is_local"), [(20, True), (21, False)])
def test_the_bound_on_local_prefill_counts_missing_tokens(missing: int, is_local: bool) -> None:
    bench = Bench()
    bench.start(job("warm", tokens(64), max_tokens=1))
    work = job("a", (*tokens(64), *tokens(missing, first=800)), max_tokens=4)
    bench.reserve(work, local=20)
    assert bench.messages("a") == [Granted(attempt("a"), 64, is_local)]
    if is_local:
        bench.run_all()
        assert bench.output("a") == expected_output(work, 0)


def test_local_prefill_with_several_choices_computes_the_prompt_once() -> None:
    bench = Bench()
    work = job("a", tokens(40), max_tokens=6, choices=(0, 1, 2))
    bench.reserve(work, local=64)
    assert bench.scheduled() == {1: 40}
    bench.run_all()
    for choice in range(3):
        assert bench.output("a", choice) == expected_output(work, choice)
    assert bench.runner.num_steps == 6


def test_duplicate_reserve_changes_nothing() -> None:
    bench = Bench()
    work = job("a", tokens(40))
    bench.reserve(work)
    assert bench.reserve(work) == []
    bench.deliver(work)
    assert bench.reserve(work) == []
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)


def test_failed_transfer_leaves_the_grant_for_another_try() -> None:
    bench = Bench()
    work = job("a", tokens(40))
    bench.reserve(work)
    bench.lose_transfer("a")
    assert bench.messages("a")[-1] == TransferFailed(attempt("a"), 0, "cancelled gone")
    assert bench.counts() == (0, 3)
    bench.deliver(work, prefill_try=1)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)


def test_reservation_without_activity_times_out_retryable() -> None:
    bench = Bench(reservation_timeout_s=30.0)
    bench.reserve(job("a", tokens(40)))
    bench.advance(20.0)
    bench.handle(ChunkAnnounced(PREFILL, TransferId(attempt("a"), 0), CHUNK))
    bench.advance(10.0)
    assert bench.counts() == (0, 3)
    assert bench.core.next_deadline_s() == bench.now_s + 20.0
    bench.advance(20.0)
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), "nothing was received for too long", True)
    assert bench.counts() == (0, 0)


def test_received_attempt_does_not_time_out_before_its_deadline() -> None:
    bench = Bench(reservation_timeout_s=1.0)
    bench.start(job("a", tokens(40), deadline_s=50.0))
    assert bench.core.next_deadline_s() == bench.now_s + 50.0


@pytest.mark.parametrize("is_received", [False, True])
def test_deadline_fails_the_attempt_for_good(is_received: bool) -> None:
    bench = Bench()
    work = job("a", tokens(40), deadline_s=5.0)
    bench.reserve(work)
    if is_received:
        bench.deliver(work)
    bench.advance(5.0)
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), "deadline", False)
    bench.run_all()
    assert bench.counts() == (0, 0)
    assert bench.core.next_deadline_s() is None


# ---- several choices --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 64])
def test_choices_share_the_prompt_and_copy_at_most_one_block_each(length: int) -> None:
    bench = Bench()
    work = job("a", tokens(length), max_tokens=20, choices=(0, 1, 2))
    bench.start(work)
    num_prompt_blocks = -(-length // 16)
    assert bench.counts()[0] <= num_prompt_blocks + 3
    bench.run_all()
    for choice in range(3):
        assert bench.output("a", choice) == expected_output(work, choice)
    assert len({tuple(bench.output("a", choice)) for choice in range(3)}) == 3
    assert bench.runner.num_copies == (0 if length % 16 == 0 else 2)
    assert bench.counts() == (0, 0)


def test_choice_that_stops_first_leaves_and_the_others_go_on() -> None:
    free = [expected_output(job("a", tokens(20), max_tokens=9), choice) for choice in range(3)]
    stop = next(t for t in free[1][1:5] if t not in free[0] + free[2])
    work = job(
        "a", tokens(20), choices=(0, 1, 2), sampling=SamplingParams(seed=1, max_tokens=9, stop_token_ids=(stop,))
    )
    bench = Bench()
    bench.start(work)
    bench.run_all()
    assert [bench.finish_reason("a", choice) for choice in range(3)] == ["length", "stop", "length"]
    assert [bench.output("a", c) for c in range(3)] == [expected_output(work, c) for c in range(3)]


def test_cancel_of_one_choice_frees_it_and_keeps_the_others() -> None:
    bench = Bench()
    work = job("a", tokens(20), max_tokens=9, choices=(0, 1, 2))
    bench.start(work)
    bench.step()
    bench.cancel("a", (1,))
    bench.run_all()
    assert len(bench.output("a", 1)) < 9
    assert [bench.output("a", c) for c in (0, 2)] == [expected_output(work, c) for c in (0, 2)]
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("local", [0, 64])
def test_choice_cancelled_before_the_first_token_is_never_generated(local: int) -> None:
    bench = Bench(budget=16)
    work = job("a", tokens(20), max_tokens=4, choices=(0, 1, 2))
    bench.reserve(work, local)
    bench.cancel("a", (0,))
    if not local:
        bench.deliver(work)
    bench.run_all()
    assert bench.output("a", 0) == []
    assert [bench.output("a", c) for c in (1, 2)] == [expected_output(work, c) for c in (1, 2)]


def test_cancelling_the_choices_one_by_one_ends_the_attempt() -> None:
    bench = Bench()
    bench.start(job("a", tokens(20), choices=(0, 1)))
    bench.cancel("a", (0,))
    bench.cancel("a", (0,))
    bench.cancel("a", (1,))
    bench.run_all()
    assert bench.counts() == (0, 0)
    assert bench.core.next_deadline_s() is None


def test_first_tokens_that_lack_a_choice_fail_the_attempt() -> None:
    bench = Bench()
    bench.reserve(job("a", tokens(20), choices=(0, 1)))
    first = (FirstToken(0, SampledToken(1)), FirstToken(5, SampledToken(1)))
    bench.handle(FinishAnnounced(PREFILL, TransferId(attempt("a"), 0), 1, first))
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), "first tokens only of choices [0, 5]", True)
    assert bench.counts() == (0, 0)


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
    num_told = len(bench.told)
    bench.step()
    assert bench.counts() == (0, 0)
    assert bench.told[num_told:] == []


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
    assert isinstance(bench.told[-1], AttemptFailed)
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
