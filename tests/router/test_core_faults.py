"""What the router does when workers refuse, fail, fall silent or die."""

import pytest

from common.errors import InvalidRequest, NoReadyPair, WorkerFailed
from common.ids import AttemptId
from common.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    FirstTokens,
    Granted,
    Prefill,
    Refused,
    Reserve,
    TokenBatch,
    TransferFailed,
)
from common.request import FinishReason
from router.events import DropWorker, Lost, NoteRetry, WorkerLost, WorkerMessageReceived
from router.generation import Finished
from router.router_limits import RouterLimits
from tests.router.kit import Driver, ref, request, token, worker_info


def lose(driver: Driver, worker_id: str, incarnation: str = "1") -> None:
    driver.feed(WorkerLost(ref(worker_id, incarnation), "stream ended"))


# ---- decode worker lost ---------------------------------------------------------------------------------


def test_dead_decode_worker_is_replaced_by_a_replay_of_prompt_and_delivered_tokens() -> None:
    """G-15: the replay goes on at the next position and keeps the token budget."""
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request(max_tokens=12, decode_worker_id=""), decode="d0")
    driver.tokens("d0", attempt_id, *(token(position) for position in range(1, 5)))
    lose(driver, "d0")
    reserve = driver.take_one("d1")
    assert isinstance(reserve, Reserve)
    assert reserve.work.attempt_id.attempt == 1
    assert reserve.work.token_ids == (*range(64), 100, 101, 102, 103, 104)
    assert (reserve.work.num_prompt_tokens, reserve.work.num_output_tokens) == (64, 5)
    assert reserve.work.sampling.max_tokens == 12
    driver.say("d1", Granted(reserve.work.attempt_id, 0, is_local=False))
    driver.first_tokens("p0")  # position 5
    driver.report("d1", reserve.work.attempt_id)
    for position in range(5, 12):
        finish = FinishReason.LENGTH if position == 11 else None
        driver.tokens("d1", reserve.work.attempt_id, token(position, finish=finish))
    assert driver.token_ids() == [100 + position for position in range(12)]
    assert driver.finished().timings.num_retries == 1
    driver.assert_nothing_left()


def test_choices_of_a_dead_decode_worker_get_an_attempt_each_and_one_retry_is_counted() -> None:
    driver = Driver("p0", "d0", "d1")
    attempt_id = driver.to_decoding(request(num_choices=3, max_tokens=9), decode="d0")
    driver.tokens("d0", attempt_id, token(1, choice=0), token(1, choice=1, finish=FinishReason.STOP))
    lose(driver, "d0")
    reserves = driver.take("d1")
    works = [message.work for message in reserves if isinstance(message, Reserve)]
    assert [(work.choices, work.token_ids[64:]) for work in works] == [((0,), (100, 101)), ((2,), (300,))]
    assert [type(effect) for effect in driver.other_effects] == [NoteRetry]


def test_choices_without_output_stay_together_in_a_replay() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.submit(request(num_choices=3))
    driver.grant("d0")
    lose(driver, "d0")
    reserve = driver.take_one("d1")
    assert isinstance(reserve, Reserve)
    assert reserve.work.choices == (0, 1, 2)


def test_prefill_worker_is_told_when_the_decode_worker_it_ships_to_dies() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    lose(driver, "d0")
    assert driver.take("p0") == [Cancel(attempt_id)]


def test_death_that_shows_first_on_the_prefill_side_is_one_retry() -> None:
    driver = Driver("p0", "p1", "d0", "d1", limits=RouterLimits(max_retries=1))
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.say("p0", AttemptFailed(attempt_id, "link lost", is_retryable=True, prefill_try=0))
    lose(driver, "d0")
    assert isinstance(driver.take_one("d1"), Reserve)
    driver.advance(1.0)
    lose(driver, "d1")  # a second death is a second retry, which this request does not have
    assert isinstance(driver.error(), WorkerFailed)


def test_events_of_an_ended_attempt_are_ignored() -> None:
    driver = Driver("p0", "d0", "d1")
    old = driver.to_decoding(request(), decode="d0")
    lose(driver, "d0")
    driver.connect(worker_info("d0", "2"))
    driver.say("d0", TokenBatch((AttemptTokens(old, (token(1, 999),)),)))  # the dead life
    driver.say("d0", TokenBatch((AttemptTokens(old, (token(1, 999),)),)), incarnation="2")
    driver.say("p0", FirstTokens(old, 0, (token(1, 999),), 0.0, 0.0, 0))
    assert driver.token_ids() == [100]


def test_new_life_of_a_worker_ends_the_old_one_for_good() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.to_decoding(request(), decode="d0")
    driver.connect(worker_info("d0", "2"))
    reason = "a later life of the worker has connected"
    assert DropWorker(ref("d0"), reason, is_final=True) in driver.other_effects
    assert len([message for message in driver.take() if isinstance(message, Reserve)]) == 1


def test_old_life_that_thaws_cannot_replace_its_successor() -> None:
    driver = Driver("p0", "d0")
    driver.advance(4.1, silent="d0")
    driver.connect(worker_info("d0", "2"))
    driver.connect(worker_info("d0", "1"))
    reason = "a later life of the worker is connected"
    assert driver.other_effects[-1] == DropWorker(ref("d0"), reason, is_final=True)
    assert [worker.ref for worker in driver.core.workers] == [ref("p0"), ref("d0", "2")]


def test_worker_may_connect_again_under_the_same_life() -> None:
    driver = Driver("p0", "d0")
    lose(driver, "d0")
    driver.connect(worker_info("d0"))
    assert driver.core.has_ready_pair
    assert driver.other_effects == []


# ---- prefill worker lost --------------------------------------------------------------------------------


def test_dead_prefill_worker_is_replaced_against_the_same_grant() -> None:
    """B-01 with two prefill workers: same attempt, next try, and the client sees nothing."""
    driver = Driver("p0", "p1", "d0")
    driver.submit(request(max_tokens=2))
    attempt_id = driver.grant("d0", first_missing=16)
    first = driver.take_one("p0")
    assert isinstance(first, Prefill)
    lose(driver, "p0")
    second = driver.first_tokens("p1")
    assert (second.work.attempt_id, second.prefill_try, second.first_missing_token) == (attempt_id, 1, 16)
    assert driver.take("d0") == []
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100, 101]
    assert driver.finished().timings.num_retries == 1


def test_only_prefill_worker_dead_is_503_after_the_grace_and_frees_the_grant() -> None:
    """B-01 with one prefill worker."""
    driver = Driver("p0", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    lose(driver, "p0")
    driver.advance(2.9)
    assert not driver.has_ended()
    driver.advance(0.2)
    error = driver.error()
    assert isinstance(error, NoReadyPair)
    assert error.retry_after_s is not None
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.token_ids() == []
    driver.assert_nothing_left()


def test_prefill_worker_that_comes_back_within_the_grace_takes_over() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    lose(driver, "p0")
    driver.advance(2.0)
    driver.connect(worker_info("p0", "2"))
    prefill = driver.take_one("p0")
    assert isinstance(prefill, Prefill)
    assert (prefill.work.attempt_id, prefill.prefill_try) == (attempt_id, 1)
    driver.advance(10.0)
    assert not driver.has_ended()


def test_failed_transfer_is_tried_again_elsewhere_and_late_news_of_it_are_ignored() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.submit(request(max_tokens=2))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0")
    driver.say("d0", TransferFailed(attempt_id, 0, "link lost"))
    assert driver.take("p0") == [Cancel(attempt_id)]
    driver.first_tokens("p1")
    driver.say("d0", TransferFailed(attempt_id, 0, "link lost"))  # again
    driver.say("p0", AttemptFailed(attempt_id, "link lost", is_retryable=True, prefill_try=0))
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0), token(1, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100, 101]
    assert driver.finished().timings.num_retries == 1


def test_only_prefill_worker_is_tried_again_after_a_pause_and_old_tries_cannot_end_the_new() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.say("d0", TransferFailed(attempt_id, 0, "link lost"))
    assert driver.take("p0") == [Cancel(attempt_id)]
    driver.advance(0.2)
    prefill = driver.take_one("p0")
    assert isinstance(prefill, Prefill)
    assert prefill.prefill_try == 1
    driver.say("p0", AttemptFailed(attempt_id, "link lost", is_retryable=True, prefill_try=0))
    driver.say("p0", Refused(attempt_id, "busy", is_retryable=False, prefill_try=0))
    driver.advance(1.0)
    assert driver.take() == []
    assert not driver.has_ended()


def test_transfer_failure_of_a_request_that_is_gone_frees_the_decode_worker() -> None:
    driver = Driver("p0", "d0")
    stray = AttemptId(request("gone").request_id, 0)
    driver.say("d0", TransferFailed(stray, 0, "link lost"))
    assert driver.take("d0") == [Cancel(stray)]


def test_earlier_try_that_succeeds_after_all_cancels_the_later_one() -> None:
    """The prefill worker dies after the last byte; the decode worker has everything and goes on."""
    driver = Driver("p0", "p1", "d0")
    driver.submit(request(max_tokens=2))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0")
    lose(driver, "p0")
    assert isinstance(driver.take_one("p1"), Prefill)
    driver.report("d0", attempt_id)
    assert driver.take("p1") == [Cancel(attempt_id)]
    driver.tokens("d0", attempt_id, token(0), token(1, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100, 101]
    driver.assert_nothing_left()


def test_report_that_comes_while_no_prefill_worker_is_there_is_enough() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=2))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0")
    lose(driver, "p0")
    driver.report("d0", attempt_id)
    driver.advance(10.0)
    driver.tokens("d0", attempt_id, token(0), token(1, finish=FinishReason.LENGTH))
    assert isinstance(driver.finished(), Finished)


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
    """B-02: the decode worker is told at once and no text is made up."""
    driver = Driver("p0", "p1", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    driver.take("p0")
    driver.say("p0", Refused(attempt_id, "too long", is_retryable=False, prefill_try=0))
    assert isinstance(driver.error(), InvalidRequest)
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.token_ids() == []
    driver.assert_nothing_left()


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
