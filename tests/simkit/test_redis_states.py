"""No state of Redis takes serving below what "gone" gives, in a simulated cluster."""

from collections.abc import Iterator

import pytest

from tests.simkit.plan import FAULTS_START_S, REDIS_KINDS, make_plan
from tests.simkit.scenario import Run, Scenario
from tests.simkit.sim_redis import RedisState

# What takes workers, routers and streams away, so that they have to be found again.
LOSSES = ("kill", "drain", "freeze", "cut_stream", "router_crash")
NUM_SEEDS = 25


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_nothing_that_happens_to_redis_fails_a_request_or_has_it_placed_again(kind: str) -> None:
    """The scenario judges that of every run in which nothing but Redis was at fault."""
    runs = [Scenario(make_plan(seed, (kind,), rate_per_s=3.0)).run() for seed in range(NUM_SEEDS)]
    assert sum(run.faults.count(kind) for run in runs) > NUM_SEEDS


def lossy_runs(state: RedisState) -> Iterator[Run]:
    """Redis is in that state from the first fault until all is healed."""
    for seed in range(NUM_SEEDS):
        scenario = Scenario(make_plan(seed, LOSSES, rate_per_s=0.5))
        redis = scenario.cluster.redis
        scenario.cluster.time.after(FAULTS_START_S, lambda redis=redis: setattr(redis, "state", state))  # type: ignore[misc]
        yield scenario.run()


@pytest.mark.parametrize("state", [state for state in RedisState if state is not RedisState.GONE])
def test_as_much_is_answered_amid_losses_as_without_any_redis(state: RedisState) -> None:
    num_finished = [sum(run.num_finished for run in lossy_runs(each)) for each in (state, RedisState.GONE)]
    print(num_finished)
    assert num_finished[0] >= num_finished[1] > 0
