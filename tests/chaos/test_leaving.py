"""A client that means to leave goes before the end of its answer, and not before it could be asked."""

import random

import pytest

from tests.chaos.clients import SHORTEST_STAY_S, Pace
from tests.chaos.ledger import Api, Entry, Leave, Left, Outcome, Question
from tests.cluster.load import Case

QUESTION = Question(Case((3, 4), seed=1, max_tokens=50), tuple(range(50)), "")


def answered(api: Api, first_s: float, whole_s: float) -> Entry:
    entry = Entry("r", QUESTION, api, 0.0, tokens=list(range(50)), token_times_s=[first_s] * 50)
    entry.outcome, entry.ended_s = Outcome.RIGHT, whole_s
    return entry


def test_a_client_goes_with_the_token_that_it_wanted() -> None:
    entry = Entry("r", QUESTION, Api.HTTP_STREAM, 0.0, leave=Leave(3))
    entry.add([0, 1], "ab")
    with pytest.raises(Left):
        entry.add([2, 3], "cd")
    entry.end(Outcome.LEFT)
    assert entry.outcome is Outcome.LEFT


def test_who_has_everything_has_not_left() -> None:
    entry = Entry("r", QUESTION, Api.HTTP_STREAM, 0.0, leave=Leave(3))
    entry.add(list(range(50)), "")
    assert len(entry.tokens) == 50


@pytest.mark.parametrize("api", [Api.HTTP_STREAM, Api.GRPC_STREAM])
def test_a_stream_is_left_within_its_first_two_thirds_or_before_its_first_token(api: Api) -> None:
    pace, rng = Pace(), random.Random(3)
    pace.note(answered(api, first_s=0.4, whole_s=2.0))
    leaves = [pace.leave(rng, QUESTION, api) for _ in range(400)]
    early = [leave for leave in leaves if leave.after_s is not None]
    assert 60 < len(early) < 140
    assert all(leave.after_tokens == 1 and leave.after_s <= 0.4 for leave in early if leave.after_s is not None)
    late = {leave.after_tokens for leave in leaves if leave.after_s is None}
    assert (min(late), max(late)) == (1, 33)


def test_a_whole_answer_is_left_within_the_time_of_the_quickest() -> None:
    pace, rng = Pace(), random.Random(3)
    assert pace.leave(rng, QUESTION, Api.HTTP_WHOLE).after_s == SHORTEST_STAY_S
    for whole_s in (5.0, 2.0, 3.0):
        pace.note(answered(Api.HTTP_WHOLE, first_s=whole_s, whole_s=whole_s))
    stays_s = [pace.leave(rng, QUESTION, Api.HTTP_WHOLE).after_s or 0.0 for _ in range(400)]
    assert 0.2 <= min(stays_s) < 0.3
    assert 1.7 < max(stays_s) <= 1.8
