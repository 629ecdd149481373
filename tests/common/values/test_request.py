"""Which tokens may not be drawn next, and why a choice ends."""

from common.values.request import SamplingParams

PARAMS = SamplingParams(seed=1, max_tokens=9, min_tokens=2, stop_token_ids=(7,), bad_words=((5,), (1, 2), (1, 1, 3)))


def test_the_last_token_of_a_bad_word_is_banned_where_the_others_stand_before_it() -> None:
    assert PARAMS.banned_token_ids((9, 9, 8, 4), 4) == (5,)
    assert PARAMS.banned_token_ids((9, 9, 8, 1), 4) == (5, 2)
    assert PARAMS.banned_token_ids((9, 9, 1, 1), 4) == (5, 2, 3)


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    assert PARAMS.banned_token_ids((1, 1, 1), 2) == (5, 2, 3)
    assert PARAMS.banned_token_ids((1, 1, 1), 1) == (7, 5, 2)
    assert PARAMS.banned_token_ids((1, 1, 1), 0) == (7, 5)


def test_stop_tokens_are_banned_as_long_as_they_come_too_soon() -> None:
    assert [7 in PARAMS.banned_token_ids((9, 9), position) for position in range(4)] == [True, True, False, False]
