"""`python -m tests.simkit.replay SEED [--log] [--shrink]`: run one seed again; exits 1 when it fails."""

import argparse

from tests.simkit.plan import make_plan
from tests.simkit.scenario import Scenario
from tests.simkit.shrink import problem_of, shrink


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simkit.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--log", action="store_true", help="print what happened")
    parser.add_argument("--shrink", action="store_true", help="if it fails, leave out what is not needed for that")
    options = parser.parse_args(arguments)
    plan = make_plan(options.seed)
    if options.shrink and problem_of(plan) is not None:
        plan = shrink(plan)
    print(plan)
    scenario = Scenario(plan)
    try:
        run = scenario.run()
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {error}")
        return 1
    finally:
        if options.log:
            print("\n".join(scenario.cluster.log))
    print(f"right: {run.num_finished} of {run.num_requests} finished, faults {run.faults}, log {run.digest[:16]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
