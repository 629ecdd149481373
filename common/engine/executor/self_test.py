"""One forward pass before anybody depends on it: finds weights that compute nothing, warms up what is compiled late."""

from common.checkpoint import CheckpointError
from common.engine.contract.executor import Runner
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.values.request import SamplingParams


def self_test(runner: Runner, num_groups: int) -> None:
    """Prefill a token and draw the next, in the first blocks of an unused cache. Raises CheckpointError."""
    greedy = SampleSpec(choice_idx=0, position=0, params=SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    prefill = ScheduledSequence(0, (0,), 0, ((0,),) * num_groups, samples=(greedy,))
    (first,) = runner.run(StepPlan(0, (prefill,))).results
    if first.error is not None:
        raise CheckpointError(f"the model computes nothing that can be sampled from: {first.error}")
