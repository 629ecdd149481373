"""Makes a failing run small: leaves out faults and requests, one by one, for as long as it still fails."""

from collections.abc import Callable
from dataclasses import replace

from tests.simkit.plan import Plan
from tests.simkit.scenario import Scenario


def problem_of(plan: Plan) -> str | None:
    """What is wrong with a run of `plan`, or None."""
    try:
        Scenario(plan).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(plan: Plan, fails: Callable[[Plan], bool] = lambda plan: problem_of(plan) is not None) -> Plan:
    """A plan that fails, and from which nothing more can be left out. `plan` must fail."""
    smaller = _without_one(plan, fails)
    while smaller is not None:
        plan, smaller = smaller, _without_one(smaller, fails)
    return plan


def _without_one(plan: Plan, fails: Callable[[Plan], bool]) -> Plan | None:
    for idx in range(len(plan.faults)):
        smaller = replace(plan, faults=plan.faults[:idx] + plan.faults[idx + 1 :])
        if fails(smaller):
            return smaller
    for idx in range(len(plan.requests)):
        smaller = replace(plan, requests=plan.requests[:idx] + plan.requests[idx + 1 :])
        if fails(smaller):
            return smaller
    return None


def story(plan: Plan) -> str:
    """For the message of a failed test: what is wrong, and the smallest plan that shows it."""
    problem = problem_of(plan)
    assert problem is not None, f"seed {plan.seed} does not fail again: the run is not deterministic"
    smallest = shrink(plan)
    replay = f"python -m tests.simkit.replay {plan.seed} --log"
    return f"{problem}\nsmallest run: {problem_of(smallest)}\n  {smallest}\nto replay: {replay}"
