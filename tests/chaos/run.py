"""Runs rows of the fault list on real clusters, and judges what came of each."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.clients import Clients
from tests.chaos.ledger import Api, Outcome, Question, count_outcomes, problems
from tests.chaos.rig import Rig, Scene, Void, running_rig
from tests.chaos.row import Row

ACT_LIMIT_S = 120.0
HEAL_REQUESTS = 20
Report = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """What came of one row. `recovery_s`: from the fault, or its end if it lasts, until all is whole and answers."""

    name: str
    number: int
    verdict: str = "as promised"  # or: failed, void
    proof: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)
    num_retried: int = 0
    longest_pause_s: float = 0.0
    recovery_s: float = 0.0
    heal_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_rows(model: Path, questions: Sequence[Question], rows: Sequence[Row], report: Report) -> Iterator[Result]:
    """Rows of one shape share a cluster, until one of them fails."""
    for _, same in itertools.groupby(sorted(rows, key=lambda row: repr(row.shape)), key=lambda row: row.shape):
        left = list(same)
        while left:
            yield from _run_on_one_cluster(model, left, questions, report)


def _run_on_one_cluster(
    model: Path, left: list[Row], questions: Sequence[Question], report: Report
) -> Iterator[Result]:
    """Takes rows from `left`, the first at least. Ends early after a failure: the next row deserves a sound cluster."""
    try:
        with running_rig(model, left[0].shape) as rig:
            while left:
                row = left.pop(0)
                report(f"{row.name}: {row.component}, {row.fault}, {row.moment}")
                result = asyncio.run(run_row(rig, row, questions))
                yield result
                if result.verdict == "failed":
                    return
    except AssertionError as error:  # what the stopping cluster says
        report(f"stopping: {error}")


async def run_row(rig: Rig, row: Row, questions: Sequence[Question]) -> Result:
    """Load, fault, recovery, quiet, healing, books."""
    result = Result(row.name, row.number)
    async with Clients(rig.cluster.url, rig.cluster.grpc, questions, seed=row.number) as clients:
        scene = Scene(rig, clients)
        clients.start()
        try:
            await rig.until(lambda: any(e.outcome is Outcome.RIGHT for e in clients.entries), "a first answer", 60)
            async with asyncio.timeout(ACT_LIMIT_S):
                result.proof = await row.act(scene)
            result.recovery_s = await _recover(rig, clients, questions) - scene.lifted_s
            await clients.stop()
            _judge(result, row, clients, scene)
            await _heal(result, rig, clients, questions)
        except Void as error:
            result.verdict, result.problems = "void", [str(error)]
        except (AssertionError, TimeoutError) as error:
            result.verdict, result.problems = "failed", [*result.problems, f"{type(error).__name__}: {error}"]
    return result


async def _recover(rig: Rig, clients: Clients, questions: Sequence[Question]) -> float:
    """The time at which the pools are whole and requests over every API have been answered right since."""
    await rig.until_whole()
    short = min(questions, key=lambda question: len(question.expected))
    for _ in range(100):
        entries = [await clients.ask(short, api) for api in Api]
        if all(entry.outcome is Outcome.RIGHT for entry in entries):
            return entries[-1].ended_s
        await asyncio.sleep(0.1)
    raise AssertionError(f"not answered right after the fault: {problems(entries)}")


def _judge(result: Result, row: Row, clients: Clients, scene: Scene) -> None:
    entries = list(clients.entries)
    result.outcomes = dict(count_outcomes(entries))
    result.longest_pause_s = max((entry.longest_wait_s(scene.began_s) for entry in entries), default=0.0)
    bad = [entry for entry in entries if str(entry.outcome) not in row.allowed]
    result.problems = problems(bad)
    if result.problems:
        result.verdict = "failed"


async def _heal(result: Result, rig: Rig, clients: Clients, questions: Sequence[Question]) -> None:
    """Afterwards everything is as before: requests are right at once, and no block is used or held."""
    started_s = time.monotonic()
    apis = itertools.cycle(Api)
    chosen = itertools.islice(itertools.cycle(questions), HEAL_REQUESTS)
    entries = await asyncio.gather(*(clients.ask(question, next(apis)) for question in chosen))
    result.heal_s = time.monotonic() - started_s
    if found := problems(entries):
        raise AssertionError(f"after the fault: {found}")
    await asyncio.to_thread(rig.cluster.audit)


def table(rows: Iterable[Row], results: Iterable[Result]) -> Iterator[str]:
    """The chaos table, as Markdown."""
    by_name = {row.name: row for row in rows}
    yield "| row | fault | proven by | outcome | requests | longest pause | recovery | verdict |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for result in results:
        row = by_name[result.name]
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
        cells = (f"{row.number} {row.name}", f"{row.component}: {row.fault}, {row.moment}", result.proof, row.expected)
        times = (f"{result.longest_pause_s:.1f} s", f"{result.recovery_s:.1f} s")
        yield f"| {' | '.join((*cells, counts, *times, result.verdict))} |"
