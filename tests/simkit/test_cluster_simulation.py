"""Seeded runs of a whole cluster under faults. `make sim` runs ten times as many; a failing seed replays exactly."""

import os
from dataclasses import replace

import pytest

from tests.simkit import replay
from tests.simkit.plan import FAULT_KINDS, FAULTS_START_S, Plan, make_plan
from tests.simkit.scenario import Run, Scenario
from tests.simkit.shrink import problem_of, shrink, story

NUM_SEEDS = int(os.environ.get("PDSERVE_SIM_SEEDS", "200"))
FIRST_SEED = int(os.environ.get("PDSERVE_SIM_FIRST_SEED", "0"))
SEEDS_PER_TEST = 50


def run(plan: Plan) -> Run:
    return Scenario(plan).run()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST))
def test_nothing_is_ever_wrong_and_a_healed_cluster_makes_progress(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, FIRST_SEED + NUM_SEEDS)):
        plan = make_plan(seed)
        if problem_of(plan) is not None:
            raise AssertionError(story(plan))


def test_a_seed_replays_exactly() -> None:
    """The whole log, line by line."""
    for seed in range(5):
        first, second = Scenario(make_plan(seed)), Scenario(make_plan(seed))
        assert first.run() == second.run()
        assert first.cluster.log == second.cluster.log


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_of_fault_happens_and_requests_survive_it(kind: str) -> None:
    """1. that kind alone, often; 2. it did happen; 3. most requests are answered all the same.

    A dead router takes the requests along that it had.
    """
    runs = [run(make_plan(seed, (kind,), rate_per_s=1.0)) for seed in range(3)]
    assert any(kind in done.faults for done in runs)
    share = 0.3 if kind == "router_crash" else 0.5
    assert sum(done.num_finished for done in runs) > share * sum(done.num_requests for done in runs)


def test_two_faults_happen_at_one_instant() -> None:
    times = [[fault.at_s for fault in make_plan(seed, rate_per_s=3.0).faults] for seed in range(5)]
    assert any(len(set(at_s)) < len(at_s) for at_s in times)


def test_small_pools_preempt() -> None:
    assert sum(run(_crowded(make_plan(seed, rate_per_s=0.0))).num_preemptions for seed in range(10)) > 0


def test_a_failing_run_is_shrunk_to_what_it_needs() -> None:
    """A run "fails" when it has this fault and this request: nothing else is left."""
    plan = make_plan(3, rate_per_s=3.0)
    fault, request = plan.faults[len(plan.faults) // 2], plan.requests[-1]
    smallest = shrink(plan, lambda plan: fault in plan.faults and request in plan.requests)
    assert smallest == replace(plan, faults=(fault,), requests=(request,))


def test_replay_prints_the_plan_and_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["1", "--log"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 1\n")
    assert "submit r0" in printed
    assert "right: " in printed


def _crowded(plan: Plan) -> Plan:
    """All requests come at once, to one decode worker; the longest has 68 tokens, all of its blocks hold 96."""
    shape = replace(plan.shape, num_decode=1, decode_blocks=12, decode_block_size=8)
    return replace(plan, shape=shape, requests=tuple(replace(each, at_s=FAULTS_START_S) for each in plan.requests))
