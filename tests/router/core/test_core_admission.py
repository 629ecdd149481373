"""Who gets in, who waits for whom, and how requests end before their time."""

from dataclasses import replace

import pytest

from common.values.errors import DeadlineExceeded, InvalidRequest, NoReadyPair, Overloaded, RequestCancelled
from common.values.messages import Cancel, Drain, FirstTokens, Granted, Prefill, Reserve, Role, WorkerState
from common.values.request import Fingerprint, FinishReason
from router.core.events import DrainRequested, EndRequested, WorkerLost, WorkersListed
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, ref, request, token, worker_info


def cancel(driver: Driver, request_id: str = "r") -> None:
    driver.feed(EndRequested(request(request_id).request_id, RequestCancelled("client left")))


def reserved(driver: Driver, worker_id: str) -> list[str]:
    """Request ids that a decode worker was asked to take since the last look."""
    return [message.work.attempt_id.request_id for message in driver.take(worker_id) if isinstance(message, Reserve)]


# ---- overload -------------------------------------------------------------------------------------------


def test_full_queue_refuses_at_once_with_a_retry_hint_and_admitted_work_goes_on() -> None:
    """F-10: 500 at once with a bound of 64."""
    driver = Driver("p0", "d0", limits=RouterLimits(max_num_queued=64))
    for idx in range(500):
        driver.submit(request(f"r{idx}", max_tokens=2))
    refused = [idx for idx in range(500) if driver.has_ended(f"r{idx}")]
    assert refused == list(range(64, 500))
    for idx in refused:
        error = driver.error(f"r{idx}")
        assert isinstance(error, Overloaded)
        assert error.retry_after_s is not None
        assert 1.0 <= error.retry_after_s <= 30.0
    while driver.core.request_ids:
        for message in driver.take():
            if isinstance(message, Reserve):
                attempt_id = message.work.attempt_id
                driver.say("d0", Granted(attempt_id, 0, is_local=True))
                driver.report("d0", attempt_id, is_local=True)
                driver.tokens("d0", attempt_id, token(0), token(1, finish=FinishReason.LENGTH))
    assert all(driver.token_ids(f"r{idx}") == [100, 101] for idx in range(64))
    driver.assert_nothing_left()


def test_granted_request_makes_room_in_the_queue() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(max_num_queued=1))
    driver.submit(request("a"))
    driver.submit(request("b"))
    assert isinstance(driver.error("b"), Overloaded)
    driver.grant("d0")
    driver.submit(request("c"))
    assert not driver.has_ended("c")


def test_refused_and_cancelled_requests_leave_the_queue_count() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(max_num_queued=1))
    for idx in range(5):
        driver.submit(request(f"r{idx}"))
        assert not driver.has_ended(f"r{idx}")
        cancel(driver, f"r{idx}")
    driver.assert_nothing_left()


# ---- order ----------------------------------------------------------------------------------------------


def test_waiting_requests_are_served_by_priority_then_arrival() -> None:
    driver = Driver("p0", "d0")
    driver.stats("d0", kv_blocks_free=0, kv_blocks_used=64)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        driver.submit(request(name, priority=priority))
    assert driver.take("d0") == []
    driver.stats("d0")
    assert reserved(driver, "d0") == ["d", "b", "a", "c"]


def test_large_request_that_lacks_room_is_not_overtaken_by_small_ones() -> None:
    driver = Driver("p0", "d0")
    driver.stats("d0", kv_blocks_free=10, kv_blocks_used=54)
    driver.submit(request("large", num_tokens=400))
    driver.submit(request("small", num_tokens=20))
    assert driver.take("d0") == []
    driver.stats("d0", kv_blocks_free=30, kv_blocks_used=34)
    assert reserved(driver, "d0") == ["large", "small"]


def test_idle_worker_is_asked_even_for_what_seems_too_large() -> None:
    """It alone knows; a request that never fits must not wait for ever."""
    driver = Driver("p0", "d0")
    driver.submit(request(num_tokens=2000))
    assert reserved(driver, "d0") == ["r"]


def test_what_was_placed_since_the_last_report_counts_as_taken() -> None:
    driver = Driver("p0", "d0")
    for idx in range(10):
        driver.submit(request(f"r{idx}", num_tokens=200))  # 13 blocks of 64 each
    assert len(reserved(driver, "d0")) == 4
    cancel(driver, "r0")
    assert reserved(driver, "d0") == ["r4"]


# ---- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reserving", "prefilling", "decoding"])
def test_deadline_cancels_on_every_worker_and_answers_504(phase: str) -> None:
    """K-02."""
    driver = Driver("p0", "d0")
    driver.submit(request(deadline_s=1.0))
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    assert reserve.work.deadline_s == pytest.approx(1.0)
    attempt_id = reserve.work.attempt_id
    if phase != "reserving":
        driver.say("d0", Granted(attempt_id, 0, is_local=False))
        driver.take("p0")
    if phase == "decoding":
        driver.report("d0", attempt_id)
    driver.advance(0.99)
    assert not driver.has_ended()
    driver.advance(0.02)
    assert isinstance(driver.error(), DeadlineExceeded)
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.take("p0") == ([] if phase == "reserving" else [Cancel(attempt_id)])
    driver.assert_nothing_left()


def test_workers_hear_the_time_that_is_left() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(deadline_s=10.0))
    driver.advance(4.0)
    driver.grant("d0")
    prefill = driver.take_one("p0")
    assert isinstance(prefill, Prefill)
    assert prefill.work.deadline_s == pytest.approx(6.0)


def test_workers_hear_whose_request_it_is() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(tenant="acme"))
    driver.grant("d0")
    prefill = driver.take_one("p0")
    assert isinstance(prefill, Prefill)
    assert prefill.work.tenant == "acme"


def test_client_that_leaves_frees_both_workers_once() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    cancel(driver)
    cancel(driver)
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.take("p0") == [Cancel(attempt_id)]
    driver.assert_nothing_left()


def test_client_that_leaves_between_grant_and_prefill_frees_the_grant() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request())
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    cancel(driver)
    assert driver.take("d0") == [Cancel(reserve.work.attempt_id)]
    driver.say("d0", Granted(reserve.work.attempt_id, 0, is_local=False))  # crossed the cancel
    assert driver.take("d0") == [Cancel(reserve.work.attempt_id)]
    driver.say("p0", FirstTokens(reserve.work.attempt_id, 0, (token(0),), 0.0, 0.0, 0))
    assert driver.take() == []
    assert driver.token_ids() == []


# ---- no worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_ids", [(), ("p0",), ("d0",)])
def test_without_a_pair_a_request_fails_at_once(worker_ids: tuple[str, ...]) -> None:
    driver = Driver(*worker_ids)
    driver.submit(request())
    driver.advance(0.001)
    error = driver.error()
    assert isinstance(error, NoReadyPair)
    assert error.retry_after_s is not None
    driver.assert_nothing_left()


def test_request_waits_a_while_when_the_last_pair_was_lost_just_now() -> None:
    driver = Driver("p0", "d0")
    driver.feed(WorkerLost(ref("d0"), "stream ended"))
    driver.advance(1.0)
    driver.submit(request())
    driver.advance(1.5)
    assert not driver.has_ended()
    driver.connect(worker_info("d0", "2"))
    assert reserved(driver, "d0") == ["r"]


def test_a_pool_that_grows_from_zero_is_waited_for_within_the_grace() -> None:
    """1. no pair for long; 2. a decode worker loads; 3. a request waits for it, and is served."""
    driver = Driver("p0", "d0")
    driver.feed(WorkerLost(ref("d0"), "stream ended"))
    driver.advance(60.0)
    driver.feed(WorkersListed(frozenset({ref("p0")}), frozenset({Role.DECODE})))
    driver.submit(request("a"))
    driver.advance(RouterLimits().pair_grace_s - 0.1)
    assert not driver.has_ended("a")
    driver.connect(worker_info("d0", "2"))
    assert reserved(driver, "d0") == ["a"]


@pytest.mark.parametrize("expected", [frozenset(), frozenset({Role.PREFILL})])
def test_a_pool_in_which_nothing_starts_is_not_waited_for(expected: frozenset[Role]) -> None:
    driver = Driver("p0", "d0")
    driver.feed(WorkerLost(ref("d0"), "stream ended"))
    driver.advance(60.0)
    driver.feed(WorkersListed(frozenset({ref("p0")}), expected))
    driver.submit(request())
    driver.advance(0.001)
    assert isinstance(driver.error(), NoReadyPair)


def test_what_is_expected_and_does_not_come_is_an_error_after_the_grace() -> None:
    driver = Driver()
    driver.feed(WorkersListed(frozenset(), frozenset(Role)))
    driver.submit(request())
    driver.advance(RouterLimits().pair_grace_s + 0.1)
    assert isinstance(driver.error(), NoReadyPair)


def test_workers_that_may_not_pair_are_no_pair() -> None:
    driver = Driver("p0")
    driver.connect(worker_info("d0", fingerprint=Fingerprint((("dtype", "bfloat16"), ("model", "tiny")))))
    driver.submit(request())
    driver.advance(0.001)
    assert isinstance(driver.error(), NoReadyPair)


def test_prefill_goes_only_to_a_worker_that_pairs_with_the_granting_one() -> None:
    other = Fingerprint((("dtype", "bfloat16"), ("model", "tiny")))
    driver = Driver("p0", "d0")
    driver.connect(worker_info("p1", fingerprint=other))
    for idx in range(4):
        driver.submit(request(f"r{idx}"))
        driver.grant("d0")
    assert driver.take("p1") == []
    assert len(driver.take("p0")) == 4


def test_without_prefill_workers_short_prompts_are_prefilled_locally() -> None:
    driver = Driver("d0", limits=RouterLimits(local_prefill_max_tokens=32))
    driver.submit(request("short", num_tokens=32))
    driver.submit(request("long", num_tokens=33))
    driver.advance(0.001)
    assert reserved(driver, "d0") == ["short"]
    assert isinstance(driver.error("long"), NoReadyPair)


# ---- hints ----------------------------------------------------------------------------------------------


def test_pinned_workers_are_used_whatever_they_cost() -> None:
    driver = Driver("p0", "p1", "d0", "d1")
    driver.stats("p1", num_waiting_uncached_tokens=100_000)
    driver.stats("d1", num_running=7)
    driver.submit(request(prefill_worker_id="p1", decode_worker_id="d1"))
    driver.grant("d1")
    assert isinstance(driver.take_one("p1"), Prefill)


@pytest.mark.parametrize(("field", "value"), [("prefill_worker_id", "d0"), ("decode_worker_id", "nobody")])
def test_pinned_worker_that_is_not_there_is_the_clients_error(field: str, value: str) -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(**{field: value}))
    error = driver.error()
    assert isinstance(error, InvalidRequest)
    assert error.param == f"routing.{field}"


def test_pinned_request_does_not_hold_up_the_others() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.stats("d0", kv_blocks_free=0, kv_blocks_used=64)
    driver.submit(request("pinned", decode_worker_id="d0"))
    driver.submit(request("free"))
    assert reserved(driver, "d1") == ["free"]


def test_empty_prompt_is_refused_before_any_worker_hears_of_it() -> None:
    driver = Driver("p0", "d0")
    driver.submit(replace(request(), token_ids=()))
    assert isinstance(driver.error(), InvalidRequest)
    assert driver.take() == []


# ---- drain and registry ---------------------------------------------------------------------------------


def test_draining_worker_gets_no_new_work_and_finishes_the_old() -> None:
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request("old", max_tokens=2), decode="d0")
    driver.feed(DrainRequested("d0", 5.0))
    assert driver.take("d0") == [Drain(5.0)]
    for idx in range(4):
        driver.submit(request(f"r{idx}"))
    assert len(reserved(driver, "d1")) == 4
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    assert driver.token_ids("old") == [100, 101]


@pytest.mark.parametrize("state", [WorkerState.LOADING, WorkerState.DRAINING, WorkerState.UNHEALTHY])
def test_only_ready_workers_get_work(state: WorkerState) -> None:
    driver = Driver("p0", "d0", "d1")
    driver.stats("d0", state=state)
    for idx in range(4):
        driver.submit(request(f"r{idx}"))
    assert reserved(driver, "d0") == []
    assert len(reserved(driver, "d1")) == 4


def test_a_worker_whose_lease_is_missing_gets_work_as_long_as_its_stream_is_open() -> None:
    driver = Driver("p0", "d0")
    for _ in range(10):
        driver.feed(WorkersListed(frozenset()))
    assert {worker.state for worker in driver.core.workers} == {WorkerState.READY}
    driver.submit(request("r0"))
    assert len(reserved(driver, "d0")) == 1
