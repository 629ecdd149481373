"""The speed of a link, from its sends."""

import pytest

from kvtransfer.links.meter import LinkMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_sends_that_overlap_share_their_time_and_rest_counts_for_nothing() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    assert meter.bytes_per_s == 0.0
    meter.started()
    clock.now_s = 0.1
    meter.started()
    clock.now_s = 0.2
    meter.ended(1000)
    clock.now_s = 0.3
    meter.ended(500)
    assert meter.bytes_per_s == pytest.approx(1500 / 0.3)
    clock.now_s = 9.0
    meter.started()
    clock.now_s = 9.1
    meter.ended(500)
    assert meter.bytes_per_s == pytest.approx(2000 / 0.4)


def test_a_link_that_becomes_slow_shows_within_seconds() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    for num_bytes in (*[1000] * 50, *[10] * 50):
        meter.started()
        clock.now_s += 0.1
        meter.ended(num_bytes)
    assert meter.bytes_per_s < 200.0
