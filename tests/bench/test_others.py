"""The bench tells when other programs took part of the machine."""

import subprocess
import sys
import time

from tests.bench.others import Others

BURN = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\nprint(flush=True)\n"
# Keeps its own children out of our process tree, as another program would be.
DETACHED = f"import os, sys\nif os.fork(): sys.exit()\nos.setsid()\n{BURN}"


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_work_of_our_children_is_our_own() -> None:
    child = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
    with Others() as others:
        burn(1.0)
        assert child.stdout is not None
        child.stdout.read(1)
    child.wait()
    assert others.own_s >= 1.0 + 1.0  # of the child's 1.5 s some may lie before the first look


def test_the_work_of_another_program_is_not() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", DETACHED], stdout=subprocess.PIPE)
    assert stranger.stdout is not None
    with Others() as others:
        stranger.stdout.read()
    stranger.wait()
    assert others.others_s >= 1.0
    assert others.own_s < 1.0
    assert others.cores > 0.0
