"""What the processes of a cluster take of the machine, and whether that has grown."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import psutil

from tests.chaos.rig import Rig

INTERVAL_S = 2.0
# What a replaced worker or another connection may add; a leak under load adds more within minutes.
SHARE, SPARE = 1.1, {"descriptors": 30, "threads": 20, "megabytes": 60.0}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sums over the router and all workers."""

    processes: float
    descriptors: float
    threads: float
    megabytes: float


class Sampler:
    """Looks at the router and the workers every few seconds."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def over(self, seconds: float) -> list[Footprint]:
        end_s, samples = time.monotonic() + seconds, []
        while time.monotonic() < end_s or not samples:
            samples.append(await asyncio.to_thread(self._sample))
            await asyncio.sleep(INTERVAL_S)
        return samples

    def _sample(self) -> Footprint:
        pids = [self._rig.router_pid(), *(int(worker["pid"]) for worker in self._rig.workers())]
        processes = [psutil.Process(pid) for pid in pids]
        return Footprint(
            len(processes),
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
            round(sum(process.memory_info().rss for process in processes) / 2**20, 1),
        )


def mean(samples: Sequence[Footprint]) -> Footprint:
    """The median of each number, which one sample amid a replacement does not move."""
    names = [each.name for each in fields(Footprint)]
    return Footprint(*(round(statistics.median(getattr(each, name) for each in samples), 1) for name in names))


def growth(before: Footprint, after: Footprint) -> list[str]:
    """What grew beyond tolerance."""
    found = []
    for name, spare in SPARE.items():
        was, is_now = getattr(before, name), getattr(after, name)
        if is_now > SHARE * was + spare:
            found.append(f"{name} grew from {was:g} to {is_now:g}")
    if before.processes != after.processes:
        found.append(f"{before.processes:g} processes before, {after.processes:g} after")
    return found
