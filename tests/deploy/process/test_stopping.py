"""Signals, the parent's death, and racing tasks."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from deploy.process.stopping import Interrupted, first_result, interruptible, stop_request

WATCHER = """
import asyncio, os, sys
from deploy.process.stopping import stop_request

async def main():
    with stop_request(os.getppid()) as stop:
        print("listening", os.getpid(), flush=True)
        await stop.wait()
        print(stop.reason, flush=True)

asyncio.run(main())
"""


async def test_a_signal_stops_and_a_second_one_hurries() -> None:
    with stop_request(os.getppid()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 60)
        assert stop.reason == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait_hurried(), 60)
        assert stop.reason == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_a_loop_listens_a_signal_ends_what_is_being_started(number: signal.Signals) -> None:
    """Once: what is started is ended in peace. Afterwards signals do what they did before."""
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name), interruptible():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


async def test_a_parent_that_died_before_we_listened_stops_at_once() -> None:
    with stop_request(parent_pid=2**22) as stop:
        assert stop.is_set
        assert "parent" in stop.reason


def test_the_death_of_the_parent_stops() -> None:
    """1. a shell starts the watcher and waits; 2. the shell is killed; 3. the watcher says why it stops."""
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WATCHER!r}])"
    parent = subprocess.Popen([sys.executable, "-c", shell], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("listening")
    parent.kill()
    assert parent.stdout.readline() == "the parent process ended\n"
    parent.wait()
    parent.stdout.close()


async def returns(value: int, delay: asyncio.Event | None = None) -> int:
    if delay is not None:
        await delay.wait()
    return value


async def fails() -> int:
    raise ValueError("broken")


async def test_first_result_returns_the_first_and_cancels_the_others() -> None:
    never = asyncio.Event()
    assert await first_result(returns(2, never), returns(1)) == 1


async def test_first_result_raises_what_the_first_raised() -> None:
    with pytest.raises(ValueError, match="broken"):
        await first_result(returns(2, asyncio.Event()), fails())
