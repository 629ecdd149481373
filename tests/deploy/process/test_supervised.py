"""A service through its lives."""

import os
import signal
import sys
from pathlib import Path

import pytest

from deploy.process.child import Child, StartFailed, start_child
from deploy.process.supervised import Supervised


def service(directory: Path, code: str, max_restarts: int | None = None) -> Supervised:
    def launch() -> Child:
        return start_child("clock", [sys.executable, "-I", "-S", "-c", code], directory / "log")

    return Supervised("clock", launch, 30.0, max_restarts)


def wait(of: Supervised) -> None:
    os.waitid(os.P_PID, of.pid, os.WEXITED | os.WNOWAIT)


def test_a_service_that_died_is_started_again_under_its_name(tmp_path: Path) -> None:
    clock = service(tmp_path, "import time; time.sleep(90)")
    assert clock.has_ended
    clock.start()
    first = clock.pid
    os.kill(first, signal.SIGKILL)
    wait(clock)
    assert clock.has_ended
    clock.restart()
    assert not clock.has_ended
    assert clock.pid != first
    clock.stop()
    assert clock.has_ended


def test_one_that_dies_again_and_again_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    clock = service(tmp_path, "print('no time')", max_restarts=2)
    clock.start()
    for _ in range(2):
        wait(clock)
        clock.restart()
    wait(clock)
    with pytest.raises(StartFailed, match="clock died 2 times: no time\nno time\nno time"):
        clock.restart()
