"""What the decode core grants, refuses and lets go."""

import pytest

from common.values.ids import TransferId
from common.values.messages import (
    AttemptFailed,
    Granted,
    HandoffReport,
    Refused,
    TransferFailed,
)
from common.worker.events import (
    PublishBlocks,
)
from kvtransfer.events import ChunkAnnounced
from tests.core_bench import attempt, tokens
from tests.decode_worker.harness import CHUNK, PREFILL, Bench, job
from tests.simkit.fake_engine import expected_output

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
    assert bench.sent[0] == Granted(attempt("a"), 0, is_local=True)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    report = bench.sent[1]
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
