"""Drafts of one sequence: its own words, and the recent answers of its tenant."""

import random

import pytest

from common.values.request import SamplingParams, Work
from decode_worker.drafting.answers import MAX_HALF, MAX_TENANTS, RecentAnswers, TenantAnswers
from decode_worker.drafting.drafter import Draft, LookupDrafter
from tests.core_bench import attempt


def draft(token_ids: list[int], max_tokens: int = 4, answers: RecentAnswers | None = None) -> list[int]:
    return list(LookupDrafter(token_ids, answers or RecentAnswers()).propose(max_tokens).token_ids)


def work(tenant: str = "", cache_salt: bytes = b"") -> Work:
    sampling = SamplingParams(seed=1, max_tokens=9)
    return Work(attempt("a"), (1, 2), 2, sampling, tenant=tenant, cache_salt=cache_salt)


def test_nothing_is_proposed_for_words_that_are_new() -> None:
    assert draft([1, 2, 3, 4, 5]) == []
    assert draft([1]) == []


def test_what_stood_behind_the_same_words_is_proposed() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]
    assert draft([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=1) == [4]


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    assert draft([7, 1, 2, 3, 1, 2, 3], max_tokens=8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft([5, 5, 5, 5], max_tokens=3) == [5, 5, 5]


def test_a_text_that_goes_on_as_before_has_ever_longer_matches() -> None:
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    drafter = LookupDrafter(token_ids, RecentAnswers())
    assert drafter.propose(2) == Draft([4, 5], 3)
    assert drafter.propose(2) == Draft([4, 5], 3)
    token_ids += [4, 5]
    assert drafter.propose(2) == Draft([6, 7], 5)
    token_ids += [6, 100]
    assert drafter.propose(2) == Draft()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_stood_behind_as_many_equal_tokens_as_it_says(seed: int) -> None:
    """A text over few words: what is proposed stood behind what it says."""
    rng = random.Random(seed)
    token_ids = [rng.randrange(5) for _ in range(10)]
    drafter = LookupDrafter(token_ids, RecentAnswers())
    for _ in range(100):
        proposed = drafter.propose(3)
        if proposed.token_ids:
            before = tuple(token_ids[-min(proposed.num_matching, len(token_ids)) :])
            text = tuple(token_ids)
            first = (*before, proposed.token_ids[0])
            assert any(text[at : at + len(first)] == first for at in range(len(text)))
        token_ids += proposed.token_ids[:2] if rng.random() < 0.5 and proposed.token_ids else [rng.randrange(5)]


def test_recent_answers_are_drafted_from_where_the_request_has_nothing() -> None:
    answers = RecentAnswers()
    answers.add([1, 2, 3, 4, 5, 6])
    assert draft([9, 1, 2, 3], answers=answers) == [4, 5, 6]
    assert draft([2, 3, 9, 8, 1, 2, 3], answers=answers) == [4, 5, 6]
    assert draft([1, 2, 3, 7, 8, 9, 1, 2, 3], answers=answers) == [7, 8, 9, 1]


def test_nothing_is_drafted_across_two_answers() -> None:
    answers = RecentAnswers()
    answers.add([1, 2, 3, 4])
    answers.add([5, 6, 7, 8])
    assert draft([1, 2, 3], answers=answers) == [4]
    assert draft([3, 4, 5], answers=answers) == []


def test_only_the_last_answers_are_kept() -> None:
    answers = RecentAnswers()
    for number in range(100):
        answers.add(range(1000 * number, 1000 * number + 1000))
        assert sum(len(half.token_ids) for half in answers.halves) <= 2 * MAX_HALF + 2
    assert draft([99_000, 99_001, 99_002], answers=answers) == [99_003, 99_004, 99_005, 99_006]
    assert draft([0, 1, 2], answers=answers) == []
    answers.add(range(3 * MAX_HALF))
    assert draft([3 * MAX_HALF - 4, 3 * MAX_HALF - 3, 3 * MAX_HALF - 2], answers=answers) == [3 * MAX_HALF - 1]


def test_nothing_crosses_from_one_tenant_or_salt_to_another() -> None:
    """Their tokens are equal; still only the same tenant with the same salt drafts from its answer."""
    answers = TenantAnswers()
    answers.of(work("alice", b"s")).add([1, 2, 3, 4, 5])
    assert draft([1, 2, 3], answers=answers.of(work("alice", b"s"))) == [4, 5]
    for other in (work("bob", b"s"), work("alice", b"t"), work("alice"), work("", b"s"), work()):
        assert draft([1, 2, 3], answers=answers.of(other)) == []


def test_answers_of_tenants_that_were_long_silent_go() -> None:
    answers = TenantAnswers()
    for number in range(MAX_TENANTS + 1):
        answers.of(work(f"t{number}")).add([1, 2, 3, 4, 5])
    assert draft([1, 2, 3], answers=answers.of(work("t1"))) == [4, 5]
    assert draft([1, 2, 3], answers=answers.of(work("t0"))) == []
