"""Refusals, retry budgets and liveness at the router core."""

import pytest

from common.values.errors import InvalidRequest, WorkerFailed
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    Granted,
    Prefill,
    Refused,
    Reserve,
    TokenBatch,
    TransferFailed,
)
from common.values.request import Adapter, FinishReason
from router.core.events import DropWorker, Lost, NoteRetry, WorkerMessageReceived
from router.core.generation import Finished
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, lose, ref, request, token, worker_info

# ---- refusals -------------------------------------------------------------------------------------------


def test_final_refusal_by_decode_is_the_clients_error_and_is_not_retried() -> None:
    """A-03: exactly one 4xx, no other decode worker is bothered."""
    driver = Driver("p0", "d0", "d1")
    driver.submit(request())
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    driver.say("d0", Refused(reserve.work.attempt_id, "64 tokens never fit", is_retryable=False))
    assert isinstance(driver.error(), InvalidRequest)
    assert driver.error().http_status == 400
    assert not [message for message in driver.take() if isinstance(message, Reserve)]
    driver.assert_nothing_left()


def test_final_refusal_by_prefill_is_the_clients_error_and_frees_the_grant() -> None:
    """B-02: the decode worker hears at once and no text is made up."""
    driver = Driver("p0", "p1", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.say("p0", Refused(attempt_id, "too long", is_retryable=False, prefill_try=0))
    assert isinstance(driver.error(), InvalidRequest)
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.token_ids() == []
    driver.assert_nothing_left()


def test_an_adapter_that_finds_no_place_holds_up_nobody_else_and_is_asked_for_again() -> None:
    """One at a time: of many requests that wait for it one asks, until it has been taken."""
    driver = Driver("p0", "d0")
    for name in ("x1", "x2"):
        driver.submit(request(name, adapter=Adapter("e" * 64, "/adapter")))
    asked = [message for message in driver.take("d0") if isinstance(message, Reserve)]
    assert len(asked) == 2
    for second in range(5):
        for message in asked:
            driver.say("d0", Refused(message.work.attempt_id, "no room for an adapter", is_retryable=True))
        driver.submit(request(f"base{second}"))
        attempt_id = driver.grant("d0")
        assert [message for message in driver.take("p0") if isinstance(message, Prefill)]
        driver.say("p0", Refused(attempt_id, "too long", is_retryable=False, prefill_try=0))
        assert driver.has_ended(f"base{second}")
        driver.take("d0")
        driver.advance(0.6)
        asked = [message for message in driver.take("d0") if isinstance(message, Reserve)]
        assert len(asked) == 1
    driver.say("d0", Granted(asked[0].work.attempt_id, 0, is_local=False))
    (other,) = driver.take("d0")
    assert isinstance(other, Reserve)
    assert other.work.adapter


def test_full_decode_worker_is_passed_over_for_another() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.submit(request())
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    driver.say("d0", Refused(reserve.work.attempt_id, "no room", is_retryable=True))
    again = driver.take_one("d1")
    assert isinstance(again, Reserve)
    assert again.work.attempt_id.attempt == 1  # a late answer to the first placement can't match
    assert driver.other_effects == []  # a refusal is no retry


def test_refusals_back_off_and_end_with_the_deadline() -> None:
    """No busy loop: the pause doubles up to two seconds."""
    driver = Driver("p0", "d0")
    driver.submit(request(deadline_s=20.0))
    num_asked = 0
    while not driver.has_ended():
        for message in driver.take("d0"):
            if isinstance(message, Reserve):
                num_asked += 1
                driver.say("d0", Refused(message.work.attempt_id, "no room", is_retryable=True))
        driver.advance(0.01)
        driver.stats("d0", kv_blocks_free=0)
    assert driver.error().http_status == 504
    assert 5 <= num_asked <= 20
    driver.assert_nothing_left()


def test_room_that_a_worker_reports_reopens_it_at_once() -> None:
    driver = Driver("p0", "d0")
    driver.stats("d0", kv_blocks_free=2)
    driver.submit(request())
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    driver.say("d0", Refused(reserve.work.attempt_id, "no room", is_retryable=True))
    driver.stats("d0", kv_blocks_free=2)
    assert driver.take("d0") == []
    driver.stats("d0", kv_blocks_free=3)
    assert isinstance(driver.take_one("d0"), Reserve)


def test_worker_that_refused_is_tried_with_one_request_first() -> None:
    driver = Driver("p0", "d0")
    for idx in range(3):
        driver.submit(request(f"r{idx}"))
    for message in driver.take("d0"):
        assert isinstance(message, Reserve)
        driver.say("d0", Refused(message.work.attempt_id, "no room", is_retryable=True))
    driver.advance(0.11)
    message = driver.take_one("d0")
    assert isinstance(message, Reserve)
    driver.say("d0", Granted(message.work.attempt_id, 0, is_local=False))
    assert len(driver.take("d0")) == 2


def test_refusal_by_prefill_keeps_the_grant_and_tries_another() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.say("p0", Refused(attempt_id, "queue full", is_retryable=True, prefill_try=0))
    prefill = driver.take_one("p1")
    assert isinstance(prefill, Prefill)
    assert prefill.work.attempt_id == attempt_id
    assert driver.take("d0") == []


# ---- failures and budgets -------------------------------------------------------------------------------


def test_failed_attempt_is_replayed_elsewhere() -> None:
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request(), decode="d0")
    driver.say("d0", AttemptFailed(attempt_id, "step failed", is_retryable=True))
    reserve = driver.take("d1")[0]
    assert isinstance(reserve, Reserve)
    assert reserve.work.token_ids[64:] == (100,)


def test_attempt_that_can_never_work_fails_the_request() -> None:
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request(), decode="d0")
    driver.say("d0", AttemptFailed(attempt_id, "row not finite", is_retryable=False))
    assert isinstance(driver.error(), WorkerFailed)
    driver.assert_nothing_left()


def test_retries_of_a_request_are_bounded() -> None:
    driver = Driver("p0", "d0", "d1", limits=RouterLimits(max_retries=2))
    driver.submit(request())
    num_asked = 0
    for _ in range(10):
        driver.advance(3.0)
        for worker_id in ("d0", "d1"):
            for message in driver.take(worker_id):
                if isinstance(message, Reserve):
                    num_asked += 1
                    attempt_id = message.work.attempt_id
                    driver.say(worker_id, Granted(attempt_id, 0, is_local=False))
                    driver.say(worker_id, AttemptFailed(attempt_id, "step failed", is_retryable=True))
            driver.stats(worker_id)
        driver.stats("p0")
    assert num_asked == 3
    assert isinstance(driver.error(), WorkerFailed)
    driver.assert_nothing_left()


def test_retries_of_all_requests_together_are_bounded() -> None:
    driver = Driver("p0", "d0", "d1", limits=RouterLimits(retry_burst=2.0, retries_per_s=0.0))
    for idx in range(4):
        driver.to_decoding(request(f"r{idx}", decode_worker_id="d0"), decode="d0")
    lose(driver, "d0")
    errors = [idx for idx in range(4) if driver.has_ended(f"r{idx}")]
    assert len(errors) == 2
    assert all(isinstance(driver.error(f"r{idx}"), WorkerFailed) for idx in errors)


def test_gap_that_never_closes_counts_as_a_failed_attempt() -> None:
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request(max_tokens=500), decode="d0")
    driver.tokens("d0", attempt_id, *(token(position) for position in range(2, 80)))
    assert Cancel(attempt_id) in driver.take("d0")
    assert driver.token_ids() == [100]
    assert isinstance(driver.take("d1")[0], Reserve)


def test_impossible_grant_is_not_believed() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.submit(request(num_tokens=64))
    attempt_id = driver.grant("d0", first_missing=64)
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert isinstance(driver.take("d1")[0], Reserve)


# ---- liveness -------------------------------------------------------------------------------------------


def test_silent_worker_is_lost_after_its_time_and_its_messages_are_ignored() -> None:
    driver = Driver("p0", "d0", "d1")
    old = driver.to_decoding(request(max_tokens=9), decode="d0")
    driver.advance(4.1, silent="d0")
    assert DropWorker(ref("d0"), "silent for 4 s") in driver.other_effects
    assert isinstance(driver.take("d1")[0], Reserve)
    driver.feed(WorkerMessageReceived(ref("d0"), TokenBatch((AttemptTokens(old, (token(1, 999),)),))))
    assert driver.token_ids() == [100]


def test_router_that_stood_still_declares_nobody_dead() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(max_tokens=2))
    driver.stall(30.0)
    assert driver.other_effects == []
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    assert isinstance(driver.events()[-1], Finished)


def test_after_restart_a_worker_gets_no_stale_call() -> None:
    """N-08: ten requests die with the prefill worker and their deadline; its next life hears of none of them."""
    driver = Driver("p0", "d0")
    for idx in range(10):
        driver.submit(request(f"r{idx}", num_tokens=20, deadline_s=3.0))
        driver.grant("d0")
    driver.take("p0")
    lose(driver, "p0")
    driver.advance(3.1)
    assert all(driver.has_ended(f"r{idx}") for idx in range(10))
    driver.connect(worker_info("p0", "2"))
    assert driver.take("p0") == []
    driver.assert_nothing_left()


def test_stale_index_entry_of_a_dead_worker_steers_nothing() -> None:
    """E-01: the index still likes the dead one, and a late answer names it."""
    driver = Driver("p0", "p1", "d0")
    driver.cached_blocks = {"p0": 3}
    lose(driver, "p0")
    for idx in range(10):
        driver.to_decoding(request(f"r{idx}"), prefill="p1")
    assert driver.take("p0") == []


@pytest.mark.parametrize("lost", [Lost.DECODE_WORKER, Lost.PREFILL_WORKER, Lost.TRANSFER])
def test_each_retry_is_noted_with_what_was_lost(lost: Lost) -> None:
    driver = Driver("p0", "p1", "d0", "d1")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    match lost:
        case Lost.DECODE_WORKER:
            lose(driver, "d0")
        case Lost.PREFILL_WORKER:
            lose(driver, "p0")
        case Lost.TRANSFER:
            driver.say("d0", TransferFailed(attempt_id, 0, "link lost"))
    notes = [effect for effect in driver.other_effects if isinstance(effect, NoteRetry)]
    assert [note.lost for note in notes] == [lost]
