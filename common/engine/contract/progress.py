"""How far a worker is with loading, in words and as a share. Pure: no torch."""

from collections.abc import Callable
from enum import StrEnum


class LoadPhase(StrEnum):
    """In their order. The names are shown to people."""

    CHECKPOINT = "opening the checkpoint"
    KERNELS = "preparing the kernels"  # the first time on a machine, compiling them
    WEIGHTS = "reading weights"
    CACHE = "allocating the KV cache"  # of what the weights leave
    SELF_TEST = "self-test"


# (phase, share of it that is done, 0 to 1). Called from the thread that loads.
Progress = Callable[[LoadPhase, float], None]


def no_progress(phase: LoadPhase, share: float) -> None:
    """Where progress is not shown."""
