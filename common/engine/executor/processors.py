"""Which processors a thread runs on: workers of one machine that compute on their own do not push each other around."""

import os

from common.telemetry.logs import get_logger


def processors(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}; empty = any."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def pin_this_thread(cpus: frozenset[int]) -> None:
    """Keep the calling thread, and those that it starts, on `cpus`; where that cannot be, say so and go on."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError) as error:  # not Linux; or none of the processors is ours
        get_logger().warning("not_pinned", cpus=sorted(cpus), error=type(error).__name__)
