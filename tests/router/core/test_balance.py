"""Prompts that a decode worker computes because prefill workers would take longer: which, and when not."""

from typing import Any

import pytest

from common.values.ids import AttemptId
from common.values.messages import Granted, Prefill, Reserve, WorkerState
from common.values.request import FinishReason
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, lose, request, token, worker_info

LIMITS = RouterLimits(local_prefill_max_tokens=16, balance_prefill_max_tokens=100)
SPEED = 1000.0


def balanced(*worker_ids: str, limits: RouterLimits = LIMITS) -> Driver:
    driver = Driver(*worker_ids, limits=limits)
    for worker_id in worker_ids:
        driver.stats(worker_id, prefill_tokens_per_s=SPEED)
    return driver


def reserve(driver: Driver, name: str, **fields: Any) -> bool:
    """Submit a request; True when its decode worker may prefill it."""
    driver.submit(request(name, **fields))
    message = driver.take_one("d0")
    assert isinstance(message, Reserve)
    assert message.local_prefill_max_tokens in (16, 100)
    return message.local_prefill_max_tokens == 100


def _decisions(driver: Driver) -> Any:
    record = driver.core.record(request("r").request_id, driver.now_s)
    assert record is not None
    return record["decisions"]


def test_a_burst_is_shared_before_any_of_it_has_reached_a_prefill_worker() -> None:
    driver = balanced("p0", "d0")
    here = [reserve(driver, f"r{idx}") for idx in range(10)]
    assert here[0] is False, "an idle prefill worker comes first"
    assert 3 <= sum(here) <= 5, "the decode worker is asked to be clearly sooner"


def test_shares_follow_the_speeds() -> None:
    driver = balanced("p0", "d0")
    driver.stats("d0", prefill_tokens_per_s=SPEED / 4)
    assert sum(reserve(driver, f"r{idx}", num_tokens=40) for idx in range(14)) in (1, 2)


def test_a_decode_worker_that_never_prefilled_counts_as_fast_as_the_others() -> None:
    driver = balanced("p0", "d0")
    driver.stats("d0", prefill_tokens_per_s=0.0)
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=200)
    assert reserve(driver, "r")


@pytest.mark.parametrize(
    ("waiting", "fields"),
    [(0, {}), (10_000, {"num_tokens": 101}), (10_000, {"prefill_worker_id": "p0"})],
    ids=["nothing waits", "long", "the client chose"],
)
def test_prefill_workers_keep(waiting: int, fields: dict[str, Any]) -> None:
    driver = balanced("p0", "d0")
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=waiting)
    assert not reserve(driver, "r", **fields)


def test_balance_is_off_without_local_prefill() -> None:
    driver = balanced("p0", "d0", limits=RouterLimits())
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=10_000)
    driver.submit(request())
    message = driver.take_one("d0")
    assert isinstance(message, Reserve)
    assert message.local_prefill_max_tokens == 0


NAN = float("nan")
BUSY = {"prefill_tokens_per_s": SPEED, "num_waiting_uncached_tokens": 10_000}


def reconnect(driver: Driver, worker_id: str) -> None:
    lose(driver, worker_id)
    driver.connect(worker_info(worker_id))


def report(driver: Driver, *worker_ids: str) -> None:
    """The prefill workers have much to do, the decode worker has not."""
    for worker_id in worker_ids:
        driver.stats(worker_id, **(BUSY if worker_id.startswith("p") else {"prefill_tokens_per_s": SPEED}))


def pass_time(driver: Driver, *reporting: str) -> None:
    """All are heard of, those alone report."""
    driver.advance(2.5)
    report(driver, *reporting)


@pytest.mark.parametrize(
    ("blind", "cause"),
    [
        (lambda driver: reconnect(driver, "d0"), "d0 has not reported yet"),
        (lambda driver: reconnect(driver, "p1"), "p1 has not reported yet"),
        (lambda driver: pass_time(driver, "p0", "p1"), "d0 has not reported for 2.5 s"),
        (lambda driver: pass_time(driver, "d0", "p1"), "p0 has not reported for 2.5 s"),
        (lambda driver: driver.stats("p1", prefill_tokens_per_s=0.0), "p1 has not measured how fast it prefills"),
    ],
    ids=["no data", "none of one of two", "stale", "stale prefill worker", "no speed"],
)
def test_what_is_not_known_is_not_idle_and_prefill_workers_keep_the_prompt(blind: Any, cause: str) -> None:
    """1. one is not known; 2. all is known: the decode worker is sooner."""
    driver = balanced("p0", "p1", "d0")
    report(driver, "p0", "p1", "d0")
    blind(driver)
    assert not reserve(driver, "r")
    assert _decisions(driver)[-1]["why"] == f"blind: {cause}"
    report(driver, "p0", "p1", "d0")
    assert reserve(driver, "again")


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_waiting_uncached_tokens": -10_000},
        {"prefill_tokens_per_s": -SPEED},
        {"prefill_tokens_per_s": NAN},
        {"step_s": float("inf")},
    ],
    ids=["negative tokens", "negative speed", "no number", "infinite"],
)
def test_numbers_that_no_worker_has_change_nothing_but_grow_old(numbers: dict[str, float]) -> None:
    """A decode worker that reports them is as busy as it was, and unknown after a while; what it is, is believed."""
    driver = balanced("p0", "d0")
    driver.stats("p0", **BUSY)
    driver.stats("d0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=7000)
    driver.stats("d0", **numbers)
    assert not reserve(driver, "r")
    assert _decisions(driver)[-1]["why"] == "sooner than the decode worker, or nearly"
    pass_time(driver, "p0")
    driver.stats("d0", **numbers)
    assert not reserve(driver, "late")
    driver.stats("d0", state=WorkerState.DRAINING, **numbers)
    assert not driver.core.has_ready_pair


def test_what_is_placed_is_counted_where_it_is_computed_and_no_longer() -> None:
    driver = balanced("p0", "d0")
    prefill, decode = driver.core.workers
    assert not reserve(driver, "there", max_tokens=1)
    assert (prefill.tokens.value, decode.tokens.value, decode.unplaced_tokens) == (0, 0, 64)
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=200)
    assert reserve(driver, "here", max_tokens=1)
    assert (decode.tokens.value, decode.unplaced_tokens) == (64, 64)
    there, here = (AttemptId(request(name).request_id, 0) for name in ("there", "here"))
    driver.say("d0", Granted(there, 0, is_local=False))
    assert (prefill.tokens.own, decode.unplaced_tokens) == (64, 0)
    driver.say("d0", Granted(here, 0, is_local=True))
    driver.report("d0", here, is_local=True, num_bytes=0, num_chunks=0)
    assert decode.tokens.own == 0
    driver.tokens("d0", here, token(0, finish=FinishReason.LENGTH))
    driver.first_tokens("p0", token(0, finish=FinishReason.LENGTH))
    driver.take()
    driver.assert_nothing_left()


def test_a_decode_worker_that_lacks_more_than_was_thought_leaves_the_prompt_to_others() -> None:
    driver = balanced("p0", "d0")
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=200)
    driver.submit(request())
    attempt_id = driver.grant("d0", is_local=False)
    message = driver.take_one("p0")
    assert isinstance(message, Prefill)
    assert message.work.attempt_id == attempt_id
    _, decode = driver.core.workers
    assert (decode.tokens.own, decode.unplaced_tokens) == (0, 0)


def test_the_costs_of_both_are_kept_with_the_decision() -> None:
    driver = balanced("p0", "d0")
    driver.stats("p0", prefill_tokens_per_s=SPEED, num_waiting_uncached_tokens=200)
    assert reserve(driver, "r")
    _, decision = _decisions(driver)
    assert (decision["role"], decision["chosen"], decision["why"]) == ("prefill", "d0", "sooner than a prefill worker")
    assert [c["cost"] for c in decision["candidates"]] == pytest.approx([0.264, 0.064])
