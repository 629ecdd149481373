"""`python -m tests.chaos.campaign kills|cancels|roll`: one fault many times, under load, on one cluster of 2+2.

As many as it takes (20 kills of each role, 10,000 requests of which almost half are left, 500 requests while every
worker is replaced), unless `--count` or `--seconds` say less. Prints what was found and writes `build/campaigns.json`;
with `--keep` also `tests/chaos/data`, from which `docs/robustness.md` is drawn.
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.clients import Clients
from tests.chaos.kept import keep
from tests.chaos.ledger import Api, Entry, Outcome, count_outcomes, in_words, problems
from tests.chaos.questions import make_questions, mixed_cases, questions_for_chaos
from tests.chaos.rig import Rig, Shape, running_rig
from tests.tiny_model import write_tiny_model
from tests.tools.robustness_doc import DATA

OUTPUT = Path("build/campaigns.json")
Findings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much: so many kills or requests, but for no longer than so many seconds."""

    count: int
    seconds: float
    seed: int
    roles: tuple[str, ...]
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.started_s + self.seconds


async def kills(rig: Rig, model: Path, plan: Plan) -> Findings:
    """kill -9 of workers of both roles by turns, at random moments; every request must end right."""
    rng, seed = random.Random(plan.seed), plan.seed
    deaths: list[Findings] = []
    questions = questions_for_chaos(model, seed)
    async with Clients(rig.cluster.url, rig.cluster.grpc, questions, at_once=8, seed=seed) as clients:
        clients.start()
        await rig.until(lambda: any(e.outcome is Outcome.RIGHT for e in clients.entries), "a first answer", 60)
        for number in range(plan.count):
            if plan.is_over:
                break
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            role = plan.roles[number % len(plan.roles)]
            victim = rng.choice(await asyncio.to_thread(rig.workers, role))
            held = sorted({holder.phase for holder in await asyncio.to_thread(rig.holders, victim)})
            died_s = time.monotonic()
            await rig.kill(victim["pid"])
            life = f"{victim['worker_id']}#{victim['incarnation']}"
            deaths.append({"role": role, "held": held, "life": life, "died_s": died_s})
            _say(f"{number + 1}/{plan.count} {victim['worker_id']} died with {held or 'nothing'}")
            await rig.until_whole()
            deaths[-1]["whole_after_s"] = time.monotonic() - died_s
        await clients.stop()
        for death in deaths:
            death["pauses_s"] = await _pauses(rig, clients.entries, death.pop("died_s"), death.pop("life"))
        return {"deaths": deaths, **_requests(clients.entries)}


async def _pauses(rig: Rig, entries: Sequence[Entry], died_s: float, life: str) -> list[float]:
    """From a worker's death to the next token of each stream that had to be placed again for it."""
    gaps = []
    for entry in entries:
        gap = entry.gap_after(died_s) if entry.api is not Api.HTTP_WHOLE and entry.was_running(died_s) else None
        if gap is not None and lost_with(await asyncio.to_thread(rig.record, entry.answer_id), life):
            gaps.append(round(gap, 3))
    return gaps


def lost_with(record: Mapping[str, Any], life: str) -> bool:
    """Whether a request was placed on that life of a worker, and then again."""
    if life.startswith("decode"):
        return life in [attempt["decode_worker"] for attempt in record.get("attempts", ())][:-1]
    chosen = [each["chosen"] for each in record.get("decisions", ()) if each["role"] == "prefill" and each["chosen"]]
    return life.partition("#")[0] in chosen[:-1]


async def cancels(rig: Rig, model: Path, plan: Plan) -> Findings:
    """Short requests, of whose clients almost half leave at random moments; at the end nothing may be held."""
    questions = make_questions(model, mixed_cases(60, plan.seed, longest_prompt=64, longest_output=16))
    async with Clients(
        rig.cluster.url, rig.cluster.grpc, questions, at_once=16, seed=plan.seed, leaving=0.45
    ) as clients:
        clients.start(plan.count)
        while any(not task.done() for task in clients.tasks) and not plan.is_over:
            await asyncio.wait(clients.tasks, timeout=20)
            _say(f"{len(clients.entries)}/{plan.count} {dict(count_outcomes(clients.entries))}")
        await clients.stop()
    workers = await asyncio.to_thread(rig.cluster.wait_until_idle)
    leaked = sum(worker["kv_blocks_used"] + worker["kv_blocks_held"] for worker in workers)
    holders = [str(holder) for worker in workers for holder in rig.holders(worker)]
    return {"blocks_leaked": leaked, "holders": holders, **_requests(clients.entries)}


async def roll(rig: Rig, model: Path, plan: Plan) -> Findings:
    """Replace every worker, one by one, at steady load, until so many requests have been made at least."""
    seed, count, roles = plan.seed, plan.count, plan.roles
    replaced: list[str] = []
    questions = questions_for_chaos(model, seed)
    async with Clients(rig.cluster.url, rig.cluster.grpc, questions, at_once=4, seed=seed) as clients:
        clients.start()
        await rig.until(lambda: any(e.outcome is Outcome.RIGHT for e in clients.entries), "a first answer", 60)
        for role in roles:
            for worker in await asyncio.to_thread(rig.workers, role):
                drained = await asyncio.to_thread(rig.cluster.cli, "drain", str(worker["worker_id"]))
                assert drained.returncode == 0, drained.stderr
                await rig.until_whole()
                replaced.append(str(worker["worker_id"]))
                _say(f"replaced {worker['worker_id']}; {dict(count_outcomes(clients.entries))}")
        left = {worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)}
        await rig.until(lambda: len(clients.entries) >= count, f"{count} requests", 240)
        await clients.stop()
    return {"replaced": replaced, "incarnations": len(left), **_requests(clients.entries)}


def _requests(entries: Sequence[Entry]) -> Findings:
    waits = [entry.longest_wait_s() for entry in entries if entry.api is not Api.HTTP_WHOLE]
    return {
        "num_requests": len(entries),
        "outcomes": dict(count_outcomes(entries)),
        "problems": problems(entries)[:20],
        "longest_wait_s": round(max(waits, default=0.0), 3),
        "longest_request_s": round(max((entry.ended_s - entry.started_s for entry in entries), default=0.0), 3),
    }


def summary(name: str, findings: Findings) -> str:
    """One paragraph for people."""
    lines = [f"{name}: {findings['num_requests']} requests, {findings['outcomes']}"]
    for role in ("prefill", "decode"):
        deaths = [death for death in findings.get("deaths", ()) if death["role"] == role]
        pauses = [pause for death in deaths for pause in death["pauses_s"]]
        if deaths:
            lines.append(f"{len(deaths)} {role} deaths, {len(pauses)} requests placed again{in_words(pauses)}")
    lines += [f"{key}: {findings[key]}" for key in ("blocks_leaked", "replaced", "longest_wait_s") if key in findings]
    return "\n  ".join([*lines, *findings["problems"]])


Campaign = Callable[[Rig, Path, Plan], Coroutine[Any, Any, Findings]]
CAMPAIGNS: dict[str, Campaign] = {"kills": kills, "cancels": cancels, "roll": roll}
COUNTS = {"kills": 40, "cancels": 10_000, "roll": 500}


def run(name: str, plan: Plan) -> Findings:
    """One campaign on a cluster of its own, whose books are audited at the end."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with running_rig(model, Shape(2, 2)) as rig:
            return asyncio.run(CAMPAIGNS[name](rig, model, plan))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.campaign", description=__doc__)
    parser.add_argument("name", choices=CAMPAIGNS)
    parser.add_argument("--count", type=int, help="kills of both roles together, or requests")
    parser.add_argument("--keep", action="store_true", help="keep the result, and draw docs/robustness.md again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no longer than this")
    parser.add_argument("--roles", default="prefill,decode")
    options = parser.parse_args(arguments)
    plan = Plan(options.count or COUNTS[options.name], options.seconds, options.seed, tuple(options.roles.split(",")))
    findings = run(options.name, plan)
    _write(OUTPUT, options.name, {"seed": options.seed, **findings})
    print(summary(options.name, findings))
    if options.keep:
        keep(OUTPUT)
    return 1 if findings["problems"] or findings.get("blocks_leaked") or findings.get("holders") else 0


def _write(path: Path, name: str, findings: Findings) -> None:
    """The last run of each campaign; of those that were not run here, the kept one."""
    path.parent.mkdir(exist_ok=True)
    kept = DATA / path.name
    runs = json.loads((path if path.exists() else kept).read_text())
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {"campaign": name, "date": date, "processors": os.cpu_count(), **findings}
    path.write_text(json.dumps([each for each in runs if each["campaign"] != name] + [run], indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
