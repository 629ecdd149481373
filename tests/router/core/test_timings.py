"""The waterfall: its parts are never negative and always add up to the wall time."""

import math
import random
from dataclasses import astuple

import pytest

from common.values.messages import Cancel
from common.values.request import FinishReason, KvChunkTiming
from router.core.events import NoteHandoff, WorkerLost
from router.core.generation import Finished, RequestTimings
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, ref, request, token


def parts(timings: RequestTimings) -> tuple[float, ...]:
    return (
        timings.route_s,
        timings.prefill_queue_s,
        timings.prefill_s,
        timings.kv_exposed_s,
        timings.decode_queue_s,
        timings.decode_s,
    )


def disaggregated(driver: Driver, *, queue_s: float, prefill_s: float, **report: object) -> RequestTimings:
    """0.1 s to the grant, 1 s to the first token, 0.5 s to the second and last."""
    driver.submit(request(max_tokens=2))
    driver.advance(0.1)
    attempt_id = driver.grant("d0")
    driver.advance(1.0)
    driver.first_tokens("p0", queue_s=queue_s, prefill_s=prefill_s)
    driver.report("d0", attempt_id, **report)
    driver.advance(0.5)
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    return driver.finished().timings


def test_disaggregated_phases_follow_one_another() -> None:
    timings = disaggregated(
        Driver("p0", "d0"), queue_s=0.2, prefill_s=0.6, exposed_s=0.05, decode_queue_s=0.01, transfer_s=0.4
    )
    assert parts(timings) == pytest.approx((0.1, 0.2, 0.6, 0.05, 0.01, 0.64))
    assert timings.wall_s == pytest.approx(1.6)
    assert timings.wall_s == sum(parts(timings))
    assert timings.time_to_first_token_s == pytest.approx(1.1)
    assert (timings.kv_bytes, timings.kv_chunks, timings.kv_transfer_s) == (4096, 2, 0.4)
    assert timings.prefill_chunks == (pytest.approx((0.3, 0.9, 64)),)


def test_kv_chunks_are_ticks_that_count_back_from_the_end_of_the_transfer() -> None:
    chunks = (KvChunkTiming(0.3, 0, 4, 64), KvChunkTiming(math.inf, 4, 8, 64), KvChunkTiming(0.0, 8, 12, 64))
    driver = Driver("p0", "d0")
    timings = disaggregated(driver, queue_s=0.2, prefill_s=0.6, exposed_s=0.05, chunks=chunks)
    assert [tick[1:] for tick in timings.kv_ticks] == [(0, 4, 64), (4, 8, 64), (8, 12, 64)]
    assert [tick[0] for tick in timings.kv_ticks] == pytest.approx([0.65, 0.95, 0.95])
    assert driver.handoffs == [NoteHandoff(ref("p0"), ref("d0"), 4096)]


def test_local_prefill_has_no_transfer() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(local_prefill_max_tokens=100))
    driver.submit(request(max_tokens=1))
    driver.advance(0.1)
    attempt_id = driver.grant("d0", is_local=True)
    driver.advance(0.4)
    report = {"is_local": True, "local_prefill_s": 0.3, "decode_queue_s": 0.05, "num_bytes": 0, "num_chunks": 0}
    driver.report("d0", attempt_id, **report)
    driver.tokens("d0", attempt_id, token(0, finish=FinishReason.LENGTH))
    timings = driver.finished().timings
    assert parts(timings) == pytest.approx((0.1, 0.0, 0.3, 0.0, 0.05, 0.05))
    assert timings.kv_transfer_s == 0.0


def test_the_first_token_never_comes_before_the_end_of_a_local_prefill() -> None:
    """The decode worker counts from the reservation, 0.1 s before its grant arrives here."""
    driver = Driver("p0", "d0", limits=RouterLimits(local_prefill_max_tokens=100))
    driver.submit(request(max_tokens=2))
    driver.advance(0.1)
    attempt_id = driver.grant("d0", is_local=True)
    driver.advance(0.3)
    driver.tokens("d0", attempt_id, token(0))
    driver.report("d0", attempt_id, is_local=True, local_prefill_s=0.35)
    driver.advance(0.5)
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    timings = driver.finished().timings
    assert timings.route_s + timings.prefill_s == pytest.approx(timings.time_to_first_token_s)
    assert parts(timings) == pytest.approx((0.1, 0.0, 0.3, 0.0, 0.01, 0.49))


def one_token_answer(messages: tuple[str, ...]) -> Finished:
    """The first token is the last; what the workers say of it comes in some order."""
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=1))
    driver.advance(0.1)
    attempt_id = driver.grant("d0")
    driver.advance(1.0)
    last = token(0, finish=FinishReason.LENGTH)
    for message in messages:
        if message == "first tokens":
            driver.first_tokens("p0", last, num_cached=16, queue_s=0.2, prefill_s=0.6)
        elif message == "report":
            driver.report("d0", attempt_id)
        else:
            driver.tokens("d0", attempt_id, last)
    driver.assert_nothing_left()
    return driver.finished()


@pytest.mark.parametrize("place", range(3))
def test_the_account_is_the_same_whatever_comes_first(place: int) -> None:
    """A decode worker that is faster than the prefill worker's own message changes no usage and no time."""
    messages = ["report", "tokens"]
    messages.insert(place, "first tokens")
    finished = one_token_answer(tuple(messages))
    assert finished == one_token_answer(("first tokens",))
    assert finished.num_cached_tokens == 16
    assert parts(finished.timings) == pytest.approx((0.1, 0.2, 0.6, 0.0, 0.0, 0.2))
    assert finished.timings.prefill_chunks == (pytest.approx((0.3, 0.9, 48)),)


def test_an_account_that_does_not_come_is_not_waited_for_long() -> None:
    """Every token is out at once; the end of the answer follows within the limit."""
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=1))
    attempt_id = driver.grant("d0")
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100]
    assert not driver.has_ended()
    driver.take()
    driver.advance(RouterLimits().account_wait_s)
    assert driver.finished().num_completion_tokens == 1
    assert driver.take("p0") == [Cancel(attempt_id)]
    driver.assert_nothing_left()


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -5.0, 1e9])
def test_nonsense_of_a_worker_cannot_break_the_sum(nonsense: float) -> None:
    timings = disaggregated(
        Driver("p0", "d0"), queue_s=nonsense, prefill_s=nonsense, exposed_s=nonsense, decode_queue_s=nonsense
    )
    assert all(part >= 0 for part in parts(timings))
    assert sum(parts(timings)) == pytest.approx(1.6)
    assert all(math.isfinite(value) for value in astuple(timings)[:9])


def test_random_durations_add_up_exactly() -> None:
    rng = random.Random(3)
    for _ in range(50):
        names = ("exposed_s", "decode_queue_s", "transfer_s")
        report = {name: rng.expovariate(5.0) for name in names}
        driver = Driver("p0", "d0")
        timings = disaggregated(driver, queue_s=rng.expovariate(3.0), prefill_s=rng.expovariate(3.0), **report)
        assert timings.wall_s == sum(parts(timings))
        assert timings.wall_s == pytest.approx(1.6)
        assert min(parts(timings)) >= 0.0


def test_time_before_a_failed_placement_counts_as_routing() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.submit(request(max_tokens=1))
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.advance(0.7)
    driver.feed(WorkerLost(ref("p0"), "stream ended"))
    driver.advance(0.2)
    driver.first_tokens("p1", token(0, finish=FinishReason.LENGTH), prefill_s=0.15)
    assert attempt_id.attempt == 0
    assert parts(driver.finished().timings) == pytest.approx((0.7, 0.0, 0.15, 0.0, 0.0, 0.05))
