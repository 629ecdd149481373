"""What the router does when workers refuse, fail, fall silent or die."""

from common.values.errors import NoReadyPair, RequestCancelled, WorkerFailed
from common.values.ids import AttemptId
from common.values.messages import (
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
from common.values.request import Fingerprint, FinishReason
from router.core.events import DropWorker, EndRequested, NoteRetry, RequestSubmitted
from router.core.generation import Finished
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, lose, ref, request, token, worker_info

OTHER_WEIGHTS = Fingerprint((("dtype", "float32"), ("model", "other")))

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


def test_an_answer_is_gone_on_with_by_the_weights_that_began_it() -> None:
    """E-06: two kinds of weights serve; what one has begun the other never ends: it waits, or fails."""
    driver = Driver("p0", "d0")
    driver.to_decoding(request("a", max_tokens=12), decode="d0")
    for worker_id in ("p1", "d1"):
        driver.connect(worker_info(worker_id, fingerprint=OTHER_WEIGHTS))
    lose(driver, "d0")
    assert driver.take("d1") == []
    driver.to_decoding(request("b", max_tokens=12), prefill="p1", decode="d1")
    driver.take()
    driver.submit(request("c"))
    assert isinstance(driver.take_one("d1"), Reserve), "what has not begun goes to the worker that is there"
    driver.connect(worker_info("d0", "2"))
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    assert reserve.work.token_ids == (*range(64), 100)
    lose(driver, "d1")
    driver.advance(RouterLimits().pair_grace_s + 1.0)
    assert isinstance(driver.error("b"), NoReadyPair)
    assert not driver.has_ended("a")


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


def test_what_an_earlier_life_of_a_worker_says_is_not_believed() -> None:
    driver = Driver("p0", "d0")
    driver.connect(worker_info("d0", "2"))
    driver.submit(request())
    attempt_id = AttemptId(request().request_id, 0)
    granted = Granted(attempt_id, first_missing_token=0, is_local=True)
    driver.say("d0", granted, incarnation="1")
    assert driver.events() == []
    driver.say("d0", granted, incarnation="2")
    assert len(driver.events()) == 1


def test_a_grant_of_an_attempt_that_ended_is_given_back_at_once() -> None:
    """Else its blocks would be held until the reservation ends by itself."""
    driver = Driver("p0", "d0")
    driver.submit(request())
    driver.take("d0")
    attempt_id = AttemptId(request().request_id, 0)
    driver.feed(EndRequested(request().request_id, RequestCancelled("client left")))
    driver.take("d0")
    driver.say("d0", Granted(attempt_id, first_missing_token=0, is_local=False))
    assert driver.take("d0") == [Cancel(attempt_id)]


def test_a_repeated_grant_changes_nothing() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(), decode="d0")
    driver.take("d0")
    driver.say("d0", Granted(attempt_id, first_missing_token=0, is_local=False))
    assert driver.take("d0") == []


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


def test_a_repeat_that_differs_from_what_was_delivered_is_replayed_not_continued() -> None:
    """1. P delivers a token; 2. D repeats it as another one and goes on; 3. nothing of that is shown; 4. a replay."""
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(max_tokens=5))
    (delivered,) = driver.token_ids()
    driver.take("d0")
    driver.tokens("d0", attempt_id, token(0, delivered + 1), token(1, 77))
    assert driver.token_ids() == [delivered]
    cancel, replay = driver.take("d0")
    assert cancel == Cancel(attempt_id)
    assert isinstance(replay, Reserve)
    assert replay.work.token_ids[-1] == delivered


def test_an_earlier_request_of_the_same_id_is_not_believed() -> None:
    """Attempts of two requests with one id are numbered apart: what is said of the first does not match."""
    driver = Driver("p0", "d0")
    old = driver.to_decoding(request())
    driver.feed(EndRequested(request().request_id, NoReadyPair("client left")))
    driver.take()
    driver.delivered.clear()
    driver.feed(RequestSubmitted(request(), first_attempt=512))
    new = driver.grant("d0")
    assert (old.attempt, new.attempt) == (0, 512)
