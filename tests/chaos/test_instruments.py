"""Orders reach a process that was started under instruments, and no other; its clock can be shifted."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.instruments import Instruments, PlantFailed, instruments

# Tells that it takes orders, then waits for the end of its input; then tells its clock.
CHILD = """
import os, sys, time
while not os.path.exists(f"{os.environ['CHAOS_FOLDER']}/{os.getpid()}"):
    time.sleep(0.001)
print("up", flush=True)
sys.stdin.read()
print(time.time(), flush=True)
"""


@contextmanager
def child_under(inside: Instruments) -> Iterator["subprocess.Popen[str]"]:
    with inside.in_environment():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            yield child
        finally:
            child.kill()


def test_an_order_is_obeyed_and_an_error_told() -> None:
    with instruments() as inside, child_under(inside) as child:
        assert inside.order(child.pid, "hits", of="break_layer") == 0
        with pytest.raises(PlantFailed, match="no_such_plant"):
            inside.order(child.pid, "no_such_plant")
        with pytest.raises(PlantFailed, match="takes no orders"):
            inside.order(1, "hits", of="break_layer")
        assert inside.moment_of_death(child.pid) == ""


def test_a_shifted_clock_is_the_processes_own() -> None:
    with instruments() as inside:
        if inside.clock is None:
            pytest.skip("no C compiler")
        with child_under(inside) as child:
            before_s = time.time()
            shown = inside.order(child.pid, "shift_clock", seconds=-3600)
            assert before_s - 3600 <= shown <= time.time() - 3600
            out, _ = child.communicate(timeout=60)
            assert before_s - 3600 <= float(out) <= time.time() - 3600


def test_the_environment_is_as_before() -> None:
    with instruments() as inside:
        with inside.in_environment():
            pass
        child = subprocess.run([sys.executable, "-c", "import sitecustomize"], capture_output=True, check=False)
        assert b"tests/chaos" not in child.stderr
        assert not list(inside.folder.glob("[0-9]*"))
