"""`python -m tests.chaos.soak`: mixed load for `SOAK_SECONDS` (600), a random fault each minute, the end quiet.

Two in three requests stream; HTTP and gRPC; shared prefixes; three clients in ten leave at random moments before the
end of their answers, and fewer than a quarter of all is a failure. Beside them `SOAK_FLOODS` (1,000) floods: bursts of
more requests than the router queues, of which some are refused and the others leave. At the end: no wrong text, no
error outside the time in which a router was down, no block held, and processes that need no more descriptors, threads
and memory than before the first fault. Prints a report, writes `build/soak.json`; with `--keep` also to
`tests/chaos/data`, from which `docs/robustness.md` is drawn.
"""

import argparse
import asyncio
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.values.errors import Overloaded, RequestCancelled
from tests.chaos.clients import Clients
from tests.chaos.floods import Floods
from tests.chaos.footprint import Footprint, Sampler, growth, mean
from tests.chaos.kept import keep
from tests.chaos.ledger import Entry, Outcome, count_outcomes
from tests.chaos.questions import make_questions, mixed_cases
from tests.chaos.rig import Rig, Scene, Shape, Void, running_rig
from tests.chaos.row import Row
from tests.chaos.rows import ROWS
from tests.tiny_model import write_tiny_model

OUTPUT = Path("build/soak.json")
FAULT_EVERY_S = 60.0
QUIET_SHARE, MAX_QUIET_S = 0.25, 120.0
LEAVING, FEWEST_LEFT = 0.3, 0.25
MAX_QUEUED, FLOOD_SIZE = 4, 24
REFUSALS = (f"{Overloaded.http_status} {Overloaded.error_type}", Overloaded.grpc_code)
# A pool of a size that fills up early: pages of the KV cache that are touched for the first time are no leak.
SHAPE = Shape(
    2,
    2,
    (
        ("prefill_worker", "num_blocks", 1500),
        ("decode_worker", "num_blocks", 1500),
        ("router", "max_num_queued", MAX_QUEUED),
    ),
)
# Faults of a router reach its clients; the others must not be noticed.
FAULTS = (
    *("prefill-killed-computing", "decode-killed-decoding", "decode-frozen", "handoff-deaf", "handoff-reset-kv"),
    *("handoff-reset-control", "redis-killed", "redis-wiped", "redis-read-only", "redis-evicting", "router-killed"),
    *("router-link-deaf", "decode-wedged"),
)


@dataclass(slots=True)
class Fault:
    """One fault of the run, with the time in which clients may have seen it."""

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
    num_seen_leaving: int = 0  # by the routers
    floods: Floods | None = None

    @property
    def left_share(self) -> float:
        """Of the clients that were answered, or left before: how many did leave."""
        counts = count_outcomes(self.entries)
        return counts[Outcome.LEFT] / max(1, counts[Outcome.LEFT] + counts[Outcome.RIGHT])

    def problems(self) -> list[str]:
        """Every way in which the promise was broken."""
        found = self.broken + [
            f"{e.request_id} {e.api} {e.outcome}: {e.detail[:200]}" for e in self.entries if self._is_bad(e)
        ]
        found += growth(mean(self.before), mean(self.after))
        found += self.floods.problems[:20] if self.floods is not None else []
        if self.left_share < FEWEST_LEFT:
            found.append(f"only {self.left_share:.0%} of the clients left before their answer was complete")
        if not any(entry.outcome is Outcome.RIGHT for entry in self.entries[-50:]):
            found.append("nothing was answered at the end")
        return found

    def _is_bad(self, entry: Entry) -> bool:
        if entry.outcome in (Outcome.RIGHT, Outcome.LEFT) or (self.floods is not None and is_refusal(entry)):
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
            "left_share": round(self.left_share, 3),
            "seen_leaving_by_routers": self.num_seen_leaving,
            **self._floods_as_dict(),
            "left_before_first_token": sum(e.outcome is Outcome.LEFT and not e.tokens for e in self.entries),
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

    def _floods_as_dict(self) -> dict[str, Any]:
        floods = self.floods
        if floods is None:
            return {}
        refused = sum(map(is_refusal, self.entries))
        found = {"floods": floods.num_floods, "refused": floods.num_refused + refused, "left_floods": floods.num_left}
        return {**found, "departures": floods.num_left + count_outcomes(self.entries)[Outcome.LEFT]}


def is_refusal(entry: Entry) -> bool:
    """Told at once, before any token, that too many wait already: what a flood means to others without a tenant."""
    return entry.outcome is Outcome.ERROR and not entry.tokens and entry.detail.startswith(REFUSALS)


async def soak(rig: Rig, model: Path, seconds: float, seed: int, num_floods: int) -> Soak:
    """Warm-up and first footprint, faults, quiet and second footprint."""
    run, rng = Soak(seed, seconds), random.Random(seed)
    questions = make_questions(model, mixed_cases(48, seed, longest_prompt=500, longest_output=240))
    end_s = run.started_s + seconds
    quiet_from_s = end_s - min(MAX_QUIET_S, QUIET_SHARE * seconds)
    async with (
        Clients(rig.cluster.url, rig.cluster.grpc, questions, seed=seed, leaving=LEAVING, unshared=0.5) as clients,
        _counting_departures(run, rig),
    ):
        run.entries = clients.entries
        run.floods = Floods(rig.cluster.url, random.Random(seed), FLOOD_SIZE)
        flooding = asyncio.create_task(run.floods.run(num_floods, quiet_from_s))
        clients.start()
        await asyncio.sleep(min(FAULT_EVERY_S, QUIET_SHARE * seconds) / 2)  # caches fill, threads start
        run.before = await Sampler(rig).over(min(FAULT_EVERY_S, QUIET_SHARE * seconds) / 2)
        await _make_faults(run, rig, clients, rng, quiet_from_s)
        await flooding
        await asyncio.sleep(max(0.0, (end_s - time.monotonic()) / 2))
        run.after = await Sampler(rig).over(max(10.0, end_s - time.monotonic()))
        await clients.stop()
    return run


@asynccontextmanager
async def _counting_departures(run: Soak, rig: Rig) -> AsyncIterator[None]:
    """Adds up what each router has counted; what one counts in its last second before it is killed is missing."""

    async def look() -> None:
        last = 0.0
        while True:
            with suppress(httpx.HTTPError):
                name = "pdserve_requests_total"
                seen = await asyncio.to_thread(rig.counter, name, status="failed", error_type=RequestCancelled.code)
                run.num_seen_leaving += int(seen - last if seen >= last else seen)
                last = seen
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    try:
        yield
        await asyncio.sleep(2.0)
    finally:
        looking.cancel()
        await asyncio.wait([looking])


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
    lines = [
        f"soak of {run.seconds:g} s: {found['num_requests']} requests, {found['outcomes']}, {run.left_share:.0%} left; "
        f"the routers saw {run.num_seen_leaving} leave"
    ]
    lines += [f"  {found['floods']} floods, {found['refused']} refused; {found['departures']} departures in all"]
    lines += [f"  {fault['at_s']:6.1f} s {fault['name']}: {fault['proof']}" for fault in found["faults"]]
    lines += [f"  void: {text}" for text in run.void]
    lines += [f"  {when}: {found[when]}" for when in ("before", "after")]
    return "\n".join([*lines, *(found["problems"] or ["no wrong text, no leak, nothing grew"])])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the result, and draw docs/robustness.md again")
    options = parser.parse_args(arguments)
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    num_floods = int(os.environ.get("SOAK_FLOODS", "1000"))
    seed = int(os.environ.get("SOAK_SEED", str(random.randrange(1 << 16))))
    _say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with running_rig(model, SHAPE) as rig:
            run = asyncio.run(soak(rig, model, seconds, seed, num_floods))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(run.as_dict(), indent=1) + "\n")
    print(report(run))
    if options.keep:
        keep(OUTPUT)
    return 1 if run.problems() else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
