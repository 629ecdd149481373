"""A life that stood still is noticed by the worker itself, and one whose step does not end."""

import pytest

from common.values.messages import WorkerState
from common.worker import watchdog
from common.worker.watchdog import LEASES, StepWedged, Watchdog, until_over


def test_a_pulse_that_was_late_by_less_than_the_limit_is_well() -> None:
    watchdog = Watchdog(lease_s=3.0, now_s=100.0)
    assert watchdog.beat(100.25) == 0.0
    assert watchdog.beat(100.25 + LEASES * 3.0) == 0.0
    assert watchdog.beat(106.5) == 0.0


def test_standing_still_beyond_the_limit_is_told_once_with_its_length() -> None:
    watchdog = Watchdog(lease_s=3.0, now_s=100.0)
    assert watchdog.beat(106.5) == 6.5
    assert watchdog.beat(106.75) == 0.0


async def test_a_worker_that_is_unhealthy_is_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STATS_INTERVAL_S", 0.0)
    states = iter([WorkerState.READY, WorkerState.READY, WorkerState.DRAINING, WorkerState.UNHEALTHY])
    with pytest.raises(StepWedged):
        await until_over(3600.0, lambda: next(states))


async def test_a_process_that_stood_still_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STATS_INTERVAL_S", 0.0)
    now_s = iter([10.0, 10.25, 10.5, 20.0])
    assert await until_over(3.0, lambda: WorkerState.READY, lambda: next(now_s)) == 9.5
