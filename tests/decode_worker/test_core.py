"""The decode core, claim by claim."""

import pytest

from common.values.ids import RouterId, TransferId
from common.values.messages import (
    AttemptFailed,
    Granted,
    HandoffReport,
    TokenBatch,
)
from common.values.request import FinishReason, SampledToken, SamplingParams
from common.worker.events import (
    SendToRouter,
)
from kvtransfer.events import FinishAnnounced, FirstToken
from tests.core_bench import attempt, tokens
from tests.decode_worker.harness import PREFILL, Bench, job
from tests.simkit.fake_engine import expected_output


def test_one_attempt_from_reservation_to_last_token() -> None:
    bench = Bench()
    work = job("a", tokens(100), max_tokens=5)
    bench.reserve(work)
    assert bench.sent == [Granted(attempt("a"), 0, is_local=False)]
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
    kinds = [type(message) for message in bench.sent]
    assert kinds[:3] == [Granted, HandoffReport, TokenBatch]
    assert kinds.count(HandoffReport) == 1
    assert bench.sent[1] == HandoffReport(attempt("a"), 1000, 4, 0.5, 0.1, 0.0, 0, is_local=False)


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
    reason = "first tokens only of choices [0, 5], or too few candidates: 0"
    assert bench.messages("a")[-1] == AttemptFailed(attempt("a"), reason, True)
    assert bench.counts() == (0, 0)
