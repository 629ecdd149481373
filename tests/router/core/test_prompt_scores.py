"""Logprobs of a prompt reach the client before any token, once each, whoever is heard first and whoever dies."""

import pytest

from common.values.ids import AttemptId
from common.values.messages import AttemptFailed, FirstTokens, Prefill, PromptScored, Reserve
from common.values.request import FinishReason, PromptLogprobs
from router.core.events import LookupPrefix
from router.core.generation import Accepted, Finished, GenerationEvent, Tokens
from tests.router.core.kit import Driver, lose, request, token

NUM_TOKENS = 64


def scores(start: int, end: int) -> PromptLogprobs:
    positions = range(start, end)
    return PromptLogprobs(start, tuple(-position / 8 for position in positions), tuple(positions))


def begun(max_tokens: int = 4) -> tuple[Driver, AttemptId]:
    """A request that wants its prompt scored, on its way to p0 for d0."""
    driver = Driver("p0", "p1", "d0", "d1")
    driver.submit(request(num_tokens=NUM_TOKENS, max_tokens=max_tokens, num_prompt_logprobs=2))
    return driver, driver.grant("d0")


def say_scores(driver: Driver, attempt_id: AttemptId, start: int, end: int, worker: str = "p0", try_: int = 0) -> None:
    driver.say(worker, PromptScored(attempt_id, scores(start, end), try_))


def kinds(driver: Driver) -> list[type[GenerationEvent]]:
    return [type(event) for event in driver.events() if not isinstance(event, Accepted)]


def delivered(driver: Driver) -> list[float]:
    return [logprob for event in driver.events() if isinstance(event, PromptLogprobs) for logprob in event.logprobs]


EXPECTED = list(scores(1, NUM_TOKENS).logprobs)


def test_parts_are_delivered_as_they_come_and_tokens_after_them() -> None:
    driver, attempt_id = begun()
    say_scores(driver, attempt_id, 1, 33)
    say_scores(driver, attempt_id, 33, NUM_TOKENS)
    driver.first_tokens("p0")
    assert kinds(driver) == [PromptLogprobs, PromptLogprobs, Tokens]
    assert delivered(driver) == EXPECTED


def test_no_worker_is_promised_a_cached_prefix() -> None:
    """It would not be used: whoever scores a prompt computes all of it."""
    driver = Driver("p0", "d0")
    driver.cached_blocks = {"p0": 3, "d0": 3}
    driver.answers_lookups = False
    driver.submit(request(num_prompt_logprobs=0))
    driver.grant("d0", first_missing=16)
    driver.first_tokens("p0")
    assert not any(isinstance(effect, LookupPrefix) for effect in driver.other_effects)
    assert not any("StaleHit" in type(effect).__name__ for effect in driver.other_effects)


def test_a_decode_worker_that_is_heard_first_waits() -> None:
    """1. KV and tokens are in d0 before the router has heard the logprobs; 2. they come; 3. everything is delivered."""
    driver, attempt_id = begun()
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0), token(1))
    say_scores(driver, attempt_id, 1, 40)
    assert kinds(driver) == [PromptLogprobs]
    say_scores(driver, attempt_id, 40, NUM_TOKENS)
    assert kinds(driver) == [PromptLogprobs, PromptLogprobs, Tokens]
    driver.first_tokens("p0")
    driver.tokens("d0", attempt_id, token(2), token(3, finish=FinishReason.LENGTH))
    assert isinstance(driver.events()[-1], Finished)
    assert len(driver.token_ids()) == 4
    driver.assert_nothing_left()


def test_an_answer_that_was_complete_before_its_logprobs_is_not_cut_short() -> None:
    driver, attempt_id = begun(max_tokens=1)
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0, finish=FinishReason.LENGTH))
    driver.advance(5.0)
    assert kinds(driver) == []
    say_scores(driver, attempt_id, 1, NUM_TOKENS)
    driver.first_tokens("p0", token(0, finish=FinishReason.LENGTH))
    assert kinds(driver) == [PromptLogprobs, Tokens, Finished]


@pytest.mark.parametrize("how", ["lost", "failed"])
def test_when_the_rest_never_comes_the_request_is_replayed_and_nothing_is_repeated(how: str) -> None:
    """1. d0 has all KV, a part of the logprobs came; 2. p0 is gone: nobody else may fill d0; 3. a replay, in full."""
    driver, attempt_id = begun()
    say_scores(driver, attempt_id, 1, 20)
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0))
    if how == "lost":
        lose(driver, "p0")
    else:
        driver.say("p0", AttemptFailed(attempt_id, "step failed", is_retryable=True, prefill_try=0))
    (reserve,) = [message for message in driver.take() if isinstance(message, Reserve)]
    assert reserve.work.num_prompt_logprobs == 2
    assert reserve.work.attempt_id != attempt_id
    assert kinds(driver) == [PromptLogprobs]


def test_a_second_prefill_worker_repeats_nothing() -> None:
    """1. p0 dies half-way; 2. p1 fills the same grant, from the beginning; 3. each logprob is delivered once."""
    driver, attempt_id = begun()
    say_scores(driver, attempt_id, 1, 20)
    lose(driver, "p0")
    prefill = driver.take_one("p1")
    assert isinstance(prefill, Prefill)
    say_scores(driver, attempt_id, 1, 15, "p1", prefill.prefill_try)
    say_scores(driver, attempt_id, 15, NUM_TOKENS, "p1", prefill.prefill_try)
    driver.say("p1", FirstTokens(attempt_id, prefill.prefill_try, (token(0),), 0.1, 0.1, 0))
    assert delivered(driver) == EXPECTED
    assert kinds(driver)[-1] is Tokens


def test_a_replay_after_tokens_asks_for_no_logprobs() -> None:
    driver, attempt_id = begun()
    say_scores(driver, attempt_id, 1, NUM_TOKENS)
    driver.first_tokens("p0")
    driver.report("d0", attempt_id)
    lose(driver, "d0")
    reserve = driver.take_one("d1")
    assert isinstance(reserve, Reserve)
    assert reserve.work.num_prompt_logprobs is None


def test_a_worker_that_sends_tokens_without_them_is_not_believed() -> None:
    """One of an older release knows nothing of logprobs: the request fails in the end, and no answer lacks them."""
    driver, attempt_id = begun()
    driver.first_tokens("p0")
    assert kinds(driver) == []
    assert any(isinstance(message, Reserve) for message in driver.take())
    local = Driver("p0", "d0", "d1")
    local.submit(request(num_prompt_logprobs=0))
    attempt_id = local.grant("d0", is_local=True)
    local.tokens("d0", attempt_id, token(0))
    assert kinds(local) == []


def test_a_decode_worker_that_computes_the_prompt_tells_its_logprobs() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(num_tokens=NUM_TOKENS, num_prompt_logprobs=0))
    attempt_id = driver.grant("d0", is_local=True)
    driver.say("d0", PromptScored(attempt_id, scores(1, NUM_TOKENS)))
    driver.report("d0", attempt_id, is_local=True)
    driver.tokens("d0", attempt_id, token(0))
    assert kinds(driver) == [PromptLogprobs, Tokens]
    assert delivered(driver) == EXPECTED
