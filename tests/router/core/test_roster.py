"""Whom the router holds a stream to: an open stream outranks a missing lease, whatever state Redis is in."""

import random

from common.values.ids import WorkerRef
from router.core.roster import UNLISTED_S, Roster, RosterChange, StreamState

OPEN, BROKEN, ENDED = StreamState
A, B = WorkerRef("decode-0", "a"), WorkerRef("decode-1", "b")
NOBODY: frozenset[WorkerRef] = frozenset()


def both(roster: Roster, listed: frozenset[WorkerRef], stream: StreamState, at_s: float) -> RosterChange:
    return roster.follow(listed, {A: stream, B: stream}, at_s)


def test_who_is_listed_is_connected_to_once() -> None:
    roster = Roster()
    assert set(roster.follow(frozenset({A, B}), {}, 0.0).connect) == {A, B}
    assert roster.follow(frozenset({A, B}), {A: BROKEN}, 0.5).connect == (B,)


def test_an_open_stream_is_kept_for_ever_without_a_lease() -> None:
    roster = Roster()
    for at_s in (0.0, UNLISTED_S, 1000 * UNLISTED_S):
        assert both(roster, NOBODY, OPEN, at_s) == RosterChange((), (), frozenset({A, B}))


def test_a_stream_that_breaks_without_a_lease_is_tried_for_a_while_from_its_break() -> None:
    roster = Roster()
    both(roster, NOBODY, OPEN, 0.0)
    assert both(roster, NOBODY, BROKEN, 100.0).retire == ()
    assert both(roster, NOBODY, BROKEN, 99.9 + UNLISTED_S).retire == ()
    assert both(roster, NOBODY, BROKEN, 100.0 + UNLISTED_S).retire == (A, B)


def test_a_lease_or_a_stream_between_begins_the_time_anew() -> None:
    roster = Roster()
    both(roster, NOBODY, BROKEN, 0.0)
    roster.follow(frozenset({A}), {A: BROKEN, B: OPEN}, UNLISTED_S - 1)
    assert both(roster, NOBODY, BROKEN, UNLISTED_S + 1).retire == ()


def test_a_worker_that_ended_its_stream_itself_is_gone_with_its_lease() -> None:
    roster = Roster()
    assert roster.follow(frozenset({A}), {A: ENDED}, 0.0).retire == ()
    assert roster.follow(NOBODY, {A: ENDED}, 0.5).retire == (A,)


def test_a_superseded_life_is_not_connected_to_while_it_is_listed() -> None:
    roster = Roster()
    roster.supersede(A)
    assert roster.follow(frozenset({A, B}), {}, 0.0).connect == (B,)
    assert roster.follow(NOBODY, {}, 0.5).connect == ()
    assert roster.follow(frozenset({A}), {}, 1.0).connect == (A,)


def test_no_answer_of_redis_gives_up_an_open_stream() -> None:
    """Lists at random, times that jump: only who is not connected may be given up."""
    rng, roster, now_s = random.Random(5), Roster(), 0.0
    refs = [WorkerRef(f"decode-{idx}", str(life)) for idx in range(3) for life in range(2)]
    for _ in range(5000):
        now_s += rng.choice((0.1, 5.0, 100.0))
        streams = {ref: rng.choice((OPEN, BROKEN, ENDED)) for ref in rng.sample(refs, rng.randint(0, 6))}
        listed = frozenset(rng.sample(refs, rng.randint(0, 6)))
        change = roster.follow(listed, streams, now_s)
        assert not [ref for ref in change.retire if streams[ref] is OPEN or ref in listed]
        assert set(change.connect) <= listed - streams.keys()
        assert change.known == listed | streams.keys()
