"""Every planted fault is caught, by each of those that are said to catch it."""

import os
import subprocess
import sys

import pytest

from tests.simkit import cluster_worlds, handoff_worlds
from tests.simkit.explorer import Violation
from tests.simkit.mutants import MUTANTS, PLANTED, Mutant, plant
from tests.simkit.plan import make_plan
from tests.simkit.shrink import problem_of

MAX_SEEDS = 60
MAX_STATES = 20_000
CASES = [(mutant, catcher) for mutant in MUTANTS for catcher in mutant.caught_by]


@pytest.mark.parametrize(("mutant", "catcher"), CASES, ids=[f"{m.name} - {c}" for m, c in CASES])
def test_mutant_is_caught(mutant: Mutant, catcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if catcher.startswith("tests/"):
        assert _named_test_fails(mutant, catcher), "the test passes all the same"
        return
    plant(mutant, monkeypatch)
    kind, _, world = catcher.partition(": ")
    if kind == "simulator":
        assert any(problem_of(make_plan(seed)) for seed in range(MAX_SEEDS)), (
            f"{MAX_SEEDS} seeds are right all the same"
        )
        return
    with pytest.raises(Violation) as story:
        (handoff_worlds if kind == "handoff" else cluster_worlds).WORLDS[world].explore(MAX_STATES)
    print(story.value)


def _named_test_fails(mutant: Mutant, test_id: str) -> bool:
    """In a process of its own. A test that can't be run at all is no proof."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.simkit.mutants", test_id]
    environment = {**os.environ, PLANTED: mutant.name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 1


def test_at_least_eight_kinds_are_planted() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 8
