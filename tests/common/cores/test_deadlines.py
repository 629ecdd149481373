"""The deadline queue: order, moving, dropping, and that it stays small."""

import random

from common.cores.deadlines import Deadlines, earliest


def test_expired_keys_come_out_earliest_first_and_once() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("late", 3.0)
    deadlines.set("early", 1.0)
    deadlines.set("middle", 2.0)
    assert deadlines.next_s() == 1.0
    assert deadlines.pop_expired(2.0) == ["early", "middle"]
    assert deadlines.pop_expired(2.0) == []
    assert deadlines.next_s() == 3.0


def test_moved_and_discarded_deadlines_do_not_fire() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    deadlines.set("b", 2.0)
    deadlines.discard("b")
    deadlines.discard("unknown")
    assert deadlines.next_s() == 5.0
    assert deadlines.pop_expired(4.9) == []
    assert deadlines.pop_expired(5.0) == ["a"]
    assert deadlines.next_s() is None


def test_equal_deadlines_need_no_order_on_keys() -> None:
    deadlines: Deadlines[object] = Deadlines()
    first, second = object(), object()
    deadlines.set(first, 1.0)
    deadlines.set(second, 1.0)
    assert deadlines.pop_expired(1.0) == [first, second]


def test_moving_deadlines_often_does_not_grow_the_heap() -> None:
    deadlines: Deadlines[int] = Deadlines()
    rng = random.Random(1)
    expected: dict[int, float] = {}
    for step in range(10_000):
        key = rng.randrange(20)
        expected[key] = step + rng.random()
        deadlines.set(key, expected[key])
        assert deadlines.next_s() == min(expected.values())
    assert len(deadlines._heap) <= 2 * 20 + 65
    assert len(deadlines) == len(expected)


def test_earliest_ignores_what_is_not_set() -> None:
    assert earliest(None, 2.0, 1.0) == 1.0
    assert earliest(None, None) is None
