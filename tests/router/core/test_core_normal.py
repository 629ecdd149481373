"""The undisturbed life of a request."""

import pytest

from common.values.ids import RequestId
from common.values.messages import AttemptTokens, Cancel, FirstTokens, Granted, Prefill, Reserve, TokenBatch
from common.values.request import FinishReason
from router.core.events import ChoiceStopped, NoteStaleHit
from router.core.generation import Accepted, Finished, Tokens
from router.core.router_limits import RouterLimits
from tests.router.core.kit import Driver, ref, request, token


def test_request_goes_reserve_prefill_decode_and_every_token_arrives_once() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=3))
    reserve = driver.take("d0")[0]
    assert isinstance(reserve, Reserve)
    assert reserve.work.token_ids == tuple(range(64))
    assert driver.take("p0") == []  # nothing is prefilled before it is granted
    driver.say("d0", Granted(reserve.work.attempt_id, 16, is_local=False))
    prefill = driver.first_tokens("p0")
    assert (prefill.decode_worker, prefill.decode_address, prefill.first_missing_token) == (ref("d0"), "d0:9", 16)
    driver.report("d0", prefill.work.attempt_id)
    driver.tokens("d0", prefill.work.attempt_id, token(0), token(1))
    driver.tokens("d0", prefill.work.attempt_id, token(2, finish=FinishReason.LENGTH))
    kinds = [type(event) for event in driver.events()]
    assert kinds == [Accepted, Tokens, Tokens, Tokens, Finished]
    assert driver.token_ids() == [100, 101, 102]
    assert driver.finished().num_completion_tokens == 3
    assert driver.take() == []  # the workers ended by themselves
    driver.assert_nothing_left()


def test_first_token_reaches_the_client_before_the_transfer_ends_and_is_not_repeated() -> None:
    """G-03: both workers own position 0; the client gets it once, at once."""
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=12))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0")
    assert driver.token_ids() == [100]
    driver.report("d0", attempt_id)
    for position in range(12):
        finish = FinishReason.LENGTH if position == 11 else None
        driver.tokens("d0", attempt_id, token(position, finish=finish))
    assert driver.token_ids() == [100 + position for position in range(12)]
    assert driver.finished().num_completion_tokens == 12


def test_decode_workers_copy_of_the_first_token_counts_when_it_is_faster() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request())
    attempt_id = driver.grant("d0")
    prefill = driver.take_one("p0")
    assert isinstance(prefill, Prefill)
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(0), token(1))
    driver.say("p0", FirstTokens(attempt_id, 0, (token(0),), 0.1, 0.2, 32))
    assert driver.token_ids() == [100, 101]
    driver.tokens("d0", attempt_id, token(2), token(3, finish=FinishReason.LENGTH))
    assert driver.finished().num_cached_tokens == 32  # what the prefill worker said still counts


def test_max_tokens_one_is_answered_by_the_prefill_worker_and_frees_both_workers() -> None:
    """G-01: one token, and no decode step is waited for."""
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=1))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0", token(0, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100]
    assert driver.finished().num_completion_tokens == 1
    assert driver.take("d0") == [Cancel(attempt_id)]
    assert driver.take("p0") == [Cancel(attempt_id)]
    driver.tokens("d0", attempt_id, token(0, finish=FinishReason.LENGTH))  # late
    driver.assert_nothing_left()


def test_grant_for_local_prefill_needs_no_prefill_worker() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(local_prefill_max_tokens=32))
    driver.submit(request(num_tokens=64, max_tokens=2))
    attempt_id = driver.grant("d0", first_missing=48, is_local=True)
    assert driver.take("p0") == []
    driver.report("d0", attempt_id, is_local=True, num_cached_tokens=48, num_bytes=0, num_chunks=0)
    driver.tokens("d0", attempt_id, token(0), token(1, finish=FinishReason.LENGTH))
    assert driver.finished().num_cached_tokens == 48
    assert driver.accepted().prefill_worker_id == "d0"


def test_reserve_says_how_much_may_be_prefilled_locally() -> None:
    for spec, expected in ((request("a"), 32), (request("b", force_colocated=True), 64)):
        driver = Driver("p0", "d0", limits=RouterLimits(local_prefill_max_tokens=32))
        driver.submit(spec)
        reserve = driver.take_one("d0")
        assert isinstance(reserve, Reserve)
        assert reserve.local_prefill_max_tokens == expected


def test_choices_share_one_attempt_and_finish_independently() -> None:
    """G-07: the prompt counts once, each choice runs to its own end."""
    driver = Driver("p0", "d0")
    driver.submit(request(num_choices=3, max_tokens=3))
    attempt_id = driver.grant("d0")
    prefill = driver.first_tokens("p0")
    assert prefill.work.choices == (0, 1, 2)
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(1, choice=0), token(1, choice=1, finish=FinishReason.STOP))
    driver.tokens("d0", attempt_id, token(1, choice=2), token(2, choice=0, finish=FinishReason.LENGTH))
    assert not driver.has_ended()
    driver.tokens("d0", attempt_id, token(2, choice=2, finish=FinishReason.LENGTH))
    assert [len(driver.token_ids(choice=idx)) for idx in range(3)] == [3, 2, 3]
    finished = driver.finished()
    assert (finished.num_prompt_tokens, finished.num_completion_tokens) == (64, 8)
    assert driver.take() == []


def test_repeated_and_early_tokens_come_out_once_and_in_order() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(max_tokens=5))
    driver.tokens("d0", attempt_id, token(2), token(3))
    assert driver.token_ids() == [100]
    driver.tokens("d0", attempt_id, token(0), token(1), token(1))
    assert driver.token_ids() == [100, 101, 102, 103]
    driver.tokens("d0", attempt_id, token(4, finish=FinishReason.LENGTH), token(5))
    assert driver.token_ids() == [100, 101, 102, 103, 104]
    driver.assert_nothing_left()


def test_stopped_choice_is_cancelled_alone_and_the_last_one_ends_the_request() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(num_choices=2, max_tokens=50))
    spec_id = attempt_id.request_id
    driver.feed(ChoiceStopped(spec_id, 0))
    assert driver.take() == [Cancel(attempt_id, (0,))]
    driver.tokens("d0", attempt_id, token(1, choice=0), token(1, choice=1))
    assert [len(driver.token_ids(choice=idx)) for idx in range(2)] == [1, 2]
    driver.feed(ChoiceStopped(spec_id, 0))  # again: ignored
    driver.feed(ChoiceStopped(spec_id, 1))
    assert driver.take() == [Cancel(attempt_id)]
    assert isinstance(driver.finished(), Finished)
    driver.feed(ChoiceStopped(spec_id, 1))  # after the end: ignored
    driver.assert_nothing_left()


def test_choice_stopped_before_it_is_placed_is_not_asked_for() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits())
    driver.answers_lookups = False
    driver.submit(request(num_choices=2))
    driver.feed(ChoiceStopped(request().request_id, 1))
    driver.advance(0.2)
    reserve = driver.take_one("d0")
    assert isinstance(reserve, Reserve)
    assert reserve.work.choices == (0,)


def test_cached_tokens_are_those_that_the_prefill_worker_did_not_compute() -> None:
    """D-13: what the decode worker received does not count as cached."""
    for name, num_cached in (("cold", 0), ("warm", 48)):
        driver = Driver("p0", "d0")
        driver.submit(request(name, num_tokens=64, max_tokens=2))
        attempt_id = driver.grant("d0")
        driver.first_tokens("p0", num_cached=num_cached)
        driver.report("d0", attempt_id, num_cached_tokens=63)
        driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
        finished = driver.finished(name)
        assert (finished.num_prompt_tokens, finished.num_cached_tokens) == (64, num_cached)


def test_stale_hit_is_noted_and_the_prompt_is_computed() -> None:
    """E-03: the index promised blocks that were evicted in between."""
    driver = Driver("p0", "d0")
    driver.cached_blocks = {"p0": 3}
    driver.submit(request(num_tokens=64, max_tokens=2))
    attempt_id = driver.grant("d0")
    driver.first_tokens("p0", num_cached=0)
    assert driver.other_effects == [NoteStaleHit(ref("p0"), 48, 0)]
    driver.report("d0", attempt_id)
    driver.tokens("d0", attempt_id, token(1, finish=FinishReason.LENGTH))
    assert driver.token_ids() == [100, 101]


def test_index_that_does_not_answer_costs_only_its_timeout() -> None:
    driver = Driver("p0", "d0")
    driver.answers_lookups = False
    driver.submit(request())
    assert driver.take() == []
    driver.advance(0.199)
    assert driver.take() == []
    driver.advance(0.002)
    assert isinstance(driver.take_one("d0"), Reserve)


def test_prompt_shorter_than_a_block_is_not_looked_up() -> None:
    driver = Driver("p0", "d0")
    driver.answers_lookups = False
    driver.submit(request(num_tokens=16))
    assert isinstance(driver.take_one("d0"), Reserve)


@pytest.mark.parametrize("num_cached", [0, 48])
def test_accepted_names_both_workers_once(num_cached: int) -> None:
    driver = Driver("p0", "d0")
    driver.cached_blocks = {"p0": num_cached // 16}
    driver.submit(request())
    driver.grant("d0")
    accepted = driver.accepted()
    assert (accepted.prefill_worker_id, accepted.decode_worker_id) == ("p0", "d0")
    assert (accepted.num_prompt_tokens, accepted.num_cached_tokens) == (64, num_cached)


def test_repeats_of_delivered_tokens_leave_no_trace() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(max_tokens=200))
    for position in range(1, 100):
        driver.tokens("d0", attempt_id, token(position))
    driver.tokens("d0", attempt_id, *(token(position) for position in range(100)))
    assert len(driver.token_ids()) == 100
    assert driver.take() == []  # no replay


def test_runs_of_tokens_are_delivered_whole_and_their_drafts_are_on_record() -> None:
    driver = Driver("p0", "d0")
    attempt_id = driver.to_decoding(request(max_tokens=7))
    for first, num_drafts, num_accepted in ((1, 4, 2), (4, 5, 2)):
        run = tuple(token(at, finish=FinishReason.LENGTH if at == 6 else None) for at in range(first, first + 3))
        driver.say("d0", TokenBatch((AttemptTokens(attempt_id, run, num_drafts, num_accepted),)))
    assert [len(event.tokens) for event in driver.events() if isinstance(event, Tokens)] == [1, 3, 3]
    assert driver.token_ids() == [100 + position for position in range(7)]
    assert driver.finished().num_completion_tokens == 7
    record = driver.core.record(RequestId("r"), driver.now_s)
    assert record is not None
    assert (record["num_drafts"], record["num_accepted_drafts"]) == (9, 4)
