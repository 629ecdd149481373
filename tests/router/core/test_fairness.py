"""Fairness between tenants in the router's queue: turns by tokens, and room for those who have less."""

from common.values.errors import Overloaded
from common.values.ids import AttemptId
from common.values.messages import Refused, Reserve
from common.values.request import FinishReason
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, request, token


def reserved(driver: Driver) -> list[str]:
    return [m.work.attempt_id.request_id for m in driver.take("d0") if isinstance(m, Reserve)]


def full(driver: Driver) -> None:
    driver.stats("d0", kv_blocks_free=0, kv_blocks_used=64)


def test_another_tenants_request_is_next_however_many_wait_and_whatever_their_priority() -> None:
    driver = Driver("p0", "d0")
    full(driver)
    for idx in range(5):
        driver.submit(request(f"a{idx}", tenant="a", priority=-1))
    driver.submit(request("b0", tenant="b"))
    driver.submit(request("b1", tenant="b", priority=-1))
    driver.stats("d0")
    assert reserved(driver) == ["b1", "a0", "b0", "a1", "a2", "a3", "a4"]


def test_turns_are_by_tokens_not_by_requests() -> None:
    driver = Driver("p0", "d0")
    full(driver)
    for idx in range(4):
        driver.submit(request(f"long{idx}", num_tokens=90, tenant="a"))
    for idx in range(12):
        driver.submit(request(f"short{idx}", num_tokens=30, tenant="b"))
    driver.stats("d0")
    first = reserved(driver)[:9]
    assert sum(name.startswith("short") for name in first) in (6, 7)


def test_what_is_generated_counts_as_well() -> None:
    """One tenant's short prompts with long answers; the other's next prompt goes first."""
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request("a", tenant="a", max_tokens=50))
    driver.to_decoding(request("b", tenant="b", max_tokens=50))
    full(driver)
    driver.submit(request("a1", tenant="a", num_tokens=20))
    driver.submit(request("b1", tenant="b"))
    driver.tokens("d0", attempt_id, *(token(position) for position in range(1, 48)))
    driver.stats("d0")
    assert reserved(driver) == ["b1", "a1"]


def test_a_full_queue_makes_room_for_a_tenant_that_has_less_of_it() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(max_num_queued=4))
    full(driver)
    for idx in range(5):
        driver.submit(request(f"a{idx}", tenant="a"))
    assert isinstance(driver.error("a4"), Overloaded)
    for idx in range(4):
        driver.submit(request(f"b{idx}", tenant="b"))
    assert [name for name in ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3") if driver.has_ended(name)] == [
        "a2",
        "a3",
        "b2",
        "b3",
    ]
    error = driver.error("a3")
    assert isinstance(error, Overloaded)
    assert error.retry_after_s is not None
    driver.stats("d0")
    assert reserved(driver) == ["b0", "a0", "b1", "a1"]


def test_what_ends_on_a_worker_that_refused_opens_it_for_the_next() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request("a", max_tokens=2))
    driver.take()
    full(driver)
    driver.submit(request("b"))
    driver.stats("d0")
    for name in reserved(driver):
        driver.say("d0", Refused(AttemptId(request(name).request_id, 0), "full", is_retryable=True))
    assert reserved(driver) == []
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    assert reserved(driver) == ["b"]
