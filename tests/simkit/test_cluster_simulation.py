"""Seeded runs of a whole cluster under faults. `make sim` runs ten times as many; a failing seed replays exactly."""

import os

import pytest

from tests.simkit.scenario import FAULT_KINDS, Scenario

NUM_SEEDS = int(os.environ.get("PDSERVE_SIM_SEEDS", "200"))
FIRST_SEED = int(os.environ.get("PDSERVE_SIM_FIRST_SEED", "0"))
SEEDS_PER_TEST = 50


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST))
def test_nothing_is_ever_wrong_and_a_healed_cluster_makes_progress(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, FIRST_SEED + NUM_SEEDS)):
        try:
            Scenario(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_seed_replays_exactly() -> None:
    assert [Scenario(seed).run().digest for seed in range(5)] == [Scenario(seed).run().digest for seed in range(5)]


def test_every_kind_of_fault_happens_and_requests_survive_it() -> None:
    """1. each kind alone, often; 2. it did happen; 3. most requests are answered all the same."""
    for kind in FAULT_KINDS:
        runs = [Scenario(seed, (kind,), fault_rate=2.0).run() for seed in range(3)]
        assert any(kind in run.faults for run in runs), kind
        assert sum(run.num_finished for run in runs) > sum(run.num_requests for run in runs) // 2, kind


def test_small_pools_preempt() -> None:
    assert sum(Scenario(seed, fault_rate=0.0).run().num_preemptions for seed in range(30)) > 0
