"""What a step of so many rows takes, from the steps that ran."""

import pytest

from common.engine.scheduling.row_times import RowTimes


def times_of(measured: dict[int, float]) -> RowTimes:
    times = RowTimes()
    for num_rows, time_s in measured.items():
        times.add(num_rows, time_s)
    return times


def test_nothing_is_known_before_the_first_step() -> None:
    assert (RowTimes().time_s(4), RowTimes().max_rows) == (0.0, 0)


def test_between_two_that_were_measured_time_grows_evenly() -> None:
    times = times_of({2: 1.0, 10: 5.0})
    assert [times.time_s(rows) for rows in (1, 2, 4, 10)] == pytest.approx([1.0, 1.0, 2.0, 5.0])


def test_beyond_the_largest_the_last_line_goes_on_and_never_falls() -> None:
    assert times_of({4: 1.0}).time_s(40) == 1.0
    assert times_of({4: 1.0, 8: 3.0}).time_s(12) == pytest.approx(5.0)
    assert times_of({4: 3.0, 8: 1.0}).time_s(12) == 1.0


def test_the_line_does_not_hang_on_two_neighbours() -> None:
    assert times_of({4: 1.0, 19: 1.9, 20: 1.0}).time_s(40) == pytest.approx(1.0)


def test_times_follow_a_change() -> None:
    times = times_of({4: 1.0})
    for _ in range(50):
        times.add(4, 3.0)
    assert times.time_s(4) == pytest.approx(3.0, rel=0.01)


def test_one_slow_step_counts_little() -> None:
    times = times_of({4: 1.0})
    times.add(4, 1000.0)
    assert times.time_s(4) == pytest.approx(1.2)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    times = times_of({8: 1.0})
    for _ in range(1000):
        times.add(1, 0.5)
    assert (times.max_rows, times.time_s(8)) == (1, 0.5)
