"""The chance that a draft is right, learnt from what came."""

import pytest

from decode_worker.drafting.acceptance import Acceptance


def first(acceptance: Acceptance, num_matching: int) -> float:
    (chance,) = acceptance.chances(num_matching, 1)
    return chance


def test_right_drafts_raise_the_chance_and_wrong_ones_lower_it() -> None:
    acceptance = Acceptance(Acceptance())
    before = first(acceptance, 3)
    for _ in range(40):
        acceptance.learn([1], 3, [1])
    assert first(acceptance, 3) > 0.98
    for _ in range(40):
        acceptance.learn([1], 3, [2])
    assert first(acceptance, 3) < 0.02 < before


def test_what_came_behind_the_first_wrong_draft_says_nothing() -> None:
    """One right, one wrong; the third agrees by chance, and the fourth did not come."""
    learnt, by_hand = Acceptance(Acceptance()), Acceptance(Acceptance())
    learnt.learn([1, 2, 3, 4], 3, [1, 9, 3])
    by_hand.learn([1], 3, [1])
    by_hand.learn([2], 4, [9])
    assert list(learnt.chances(3, 4)) == list(by_hand.chances(3, 4))


def test_short_and_long_matches_are_told_apart() -> None:
    acceptance = Acceptance(Acceptance())
    for _ in range(40):
        acceptance.learn([1], 3, [2])
        acceptance.learn([1], 20, [1])
    assert first(acceptance, 3) < 0.05
    assert first(acceptance, 30) > 0.95


def test_several_drafts_are_right_when_each_is() -> None:
    acceptance = Acceptance(Acceptance())
    one = first(acceptance, 16)
    assert list(acceptance.chances(16, 3)) == pytest.approx([one, one**2, one**3])


def test_a_new_sequence_starts_from_what_others_met() -> None:
    others = Acceptance()
    for _ in range(20):
        sequence = Acceptance(others)
        for _ in range(20):
            sequence.learn([1], 3, [2])
    assert first(Acceptance(others), 3) < 0.1
