"""What a worker shell needs from whatever runs the model. The torch runner and the tests' fakes implement it."""

from collections.abc import Callable
from typing import Protocol

from common.engine.contract.plan import StepPlan, StepResult

# Called in the compute thread after the KV of layers [0, num_layers) is written for every token of the step.
LayerHook = Callable[[int], None]


class Runner(Protocol):
    """One model on one device, with its paged KV cache. Not thread-safe: one step at a time."""

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        """Execute one step. Raises on a device or shape error; a bad row is reported in its SequenceResult."""
        ...
