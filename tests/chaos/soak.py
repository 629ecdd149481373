"""`python -m tests.chaos.soak`: mixed load for `SOAK_SECONDS` (600), a random fault each minute, the end quiet.

Two in three requests stream; HTTP and gRPC; shared prefixes; three clients in ten leave at random moments. At the end:
no wrong text, no error outside the time in which a router was down, no block held, and processes that need no more
descriptors, threads and memory than before the first fault. Prints a report, writes `build/soak.json`.
"""

import asyncio
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.clients import Clients, Entry, Outcome, count_outcomes, make_questions, mixed_cases
from tests.chaos.footprint import Footprint, Sampler, growth, mean
from tests.chaos.rig import Rig, Scene, Shape, Void, running_rig
from tests.chaos.rows import ROWS, Row
from tests.tiny_model import write_tiny_model

OUTPUT = Path("build/soak.json")
FAULT_EVERY_S = 60.0
QUIET_SHARE, MAX_QUIET_S = 0.25, 120.0
# A pool of a size that fills up early: pages of the KV cache that are touched for the first time are no leak.
SHAPE = Shape(2, 2, (("prefill_worker", "num_blocks", 1500), ("decode_worker", "num_blocks", 1500)))
# Faults of a router are told to its clients; the others must not be noticed.
FAULTS = (
    *("prefill-killed-computing", "decode-killed-decoding", "decode-frozen", "handoff-deaf", "handoff-reset-kv"),
    *("handoff-reset-control", "redis-killed", "redis-wiped", "router-killed", "router-link-deaf", "decode-wedged"),
)


@dataclass(slots=True)
class Fault:
    """One fault of the run, with the time in which clients may have been told of it."""

    name: str
    proof: str
    began_s: float
    ended_s: float
    allowed: frozenset[str]


@dataclass(slots=True)
class Soak:
    """What the run found. Times of the clock's monotonic seconds."""

    seed: int
    seconds: float
    started_s: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # what a fault should not have done
    before: list[Footprint] = field(default_factory=list)
    after: list[Footprint] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Every way in which the promise was broken."""
        found = self.broken + [
            f"{e.request_id} {e.api} {e.outcome}: {e.detail[:200]}" for e in self.entries if self._is_bad(e)
        ]
        found += growth(mean(self.before), mean(self.after))
        if not any(entry.outcome is Outcome.RIGHT for entry in self.entries[-50:]):
            found.append("nothing was answered at the end")
        return found

    def _is_bad(self, entry: Entry) -> bool:
        if entry.outcome in (Outcome.RIGHT, Outcome.LEFT):
            return False
        return not any(
            str(entry.outcome) in fault.allowed and fault.began_s <= entry.ended_s and entry.started_s <= fault.ended_s
            for fault in self.faults
        )

    def as_dict(self) -> dict[str, Any]:
        ended = [entry for entry in self.entries if entry.outcome is Outcome.RIGHT]
        first_tokens = sorted(entry.token_times_s[0] - entry.started_s for entry in ended)
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processors": os.cpu_count(),
            "seed": self.seed,
            "seconds": self.seconds,
            "num_requests": len(self.entries),
            "outcomes": dict(count_outcomes(self.entries)),
            "tokens": sum(len(entry.tokens) for entry in self.entries),
            "first_token_median_s": round(first_tokens[len(first_tokens) // 2], 3) if first_tokens else None,
            "longest_wait_s": round(max((entry.longest_wait_s() for entry in ended), default=0.0), 3),
            "faults": [
                {"name": f.name, "proof": f.proof, "at_s": round(f.began_s - self.started_s, 1)} for f in self.faults
            ],
            "void": self.void,
            "before": asdict(mean(self.before)),
            "after": asdict(mean(self.after)),
            "problems": self.problems(),
        }


async def soak(rig: Rig, model: Path, seconds: float, seed: int) -> Soak:
    """Warm-up and first footprint, faults, quiet and second footprint."""
    run, rng = Soak(seed, seconds), random.Random(seed)
    questions = make_questions(model, mixed_cases(48, seed, longest_prompt=500, longest_output=100))
    end_s = run.started_s + seconds
    quiet_from_s = end_s - min(MAX_QUIET_S, QUIET_SHARE * seconds)
    async with Clients(
        rig.cluster.url, rig.cluster.grpc, questions, seed=seed, leaving=0.3, leaving_within_s=1.0, unshared=0.5
    ) as clients:
        run.entries = clients.entries
        clients.start()
        await asyncio.sleep(min(FAULT_EVERY_S, QUIET_SHARE * seconds) / 2)  # caches fill, threads start
        run.before = await Sampler(rig).over(min(FAULT_EVERY_S, QUIET_SHARE * seconds) / 2)
        await _make_faults(run, rig, clients, rng, quiet_from_s)
        await asyncio.sleep(max(0.0, (end_s - time.monotonic()) / 2))
        run.after = await Sampler(rig).over(max(10.0, end_s - time.monotonic()))
        await clients.stop()
    return run


async def _make_faults(run: Soak, rig: Rig, clients: Clients, rng: random.Random, until_s: float) -> None:
    by_name = {row.name: row for row in ROWS}
    names: list[str] = []
    while time.monotonic() < until_s - FAULT_EVERY_S / 3:
        names = names or rng.sample(FAULTS, len(FAULTS))
        next_s = time.monotonic() + FAULT_EVERY_S
        await _make_fault(run, rig, clients, by_name[names.pop()])
        await asyncio.sleep(max(0.0, min(next_s, until_s) - time.monotonic()))


async def _make_fault(run: Soak, rig: Rig, clients: Clients, row: Row) -> None:
    scene = Scene(rig, clients)
    try:
        proof = await row.act(scene)
        await rig.until_whole()
    except Void as error:
        run.void.append(f"{row.name}: {error}")
        return
    except AssertionError as error:
        run.broken.append(f"{row.name}: {error}")
        return
    run.faults.append(Fault(row.name, proof, scene.began_s, time.monotonic() + 2.0, row.allowed))
    _say(f"{time.monotonic() - run.started_s:5.0f} s {row.name}: {proof}; {dict(count_outcomes(clients.entries))}")


def report(run: Soak) -> str:
    found = run.as_dict()
    lines = [f"soak of {run.seconds:g} s: {found['num_requests']} requests, {found['outcomes']}"]
    lines += [f"  {fault['at_s']:6.1f} s {fault['name']}: {fault['proof']}" for fault in found["faults"]]
    lines += [f"  void: {text}" for text in run.void]
    lines += [f"  {when}: {found[when]}" for when in ("before", "after")]
    return "\n".join([*lines, *(found["problems"] or ["no wrong text, no leak, nothing grew"])])


def main(arguments: Sequence[str] | None = None) -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    seed = int(os.environ.get("SOAK_SEED", str(random.randrange(1 << 16))))
    _say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with running_rig(model, SHAPE) as rig:
            run = asyncio.run(soak(rig, model, seconds, seed))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(run.as_dict(), indent=1) + "\n")
    print(report(run))
    return 1 if run.problems() else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
