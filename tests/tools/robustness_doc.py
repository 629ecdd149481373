"""Writes the generated parts of `docs/robustness.md`: state tables, worlds, faults and mutants, drawn from the code.

`python -m tests.tools.robustness_doc` exits 1 when the file is stale; with `--write` it writes it.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtransfer.receiver import core as receiver
from kvtransfer.sender import core as sender
from router.core import transitions as router
from tests.chaos.ledger import in_words
from tests.chaos.rows import ROWS
from tests.chaos.runbook import RUNBOOK
from tests.simkit import cluster_worlds, deep_exploration, handoff_worlds
from tests.simkit.deep_exploration import KEPT as EXPLORATION
from tests.simkit.mutants import MUTANTS
from tests.simkit.plan import FAULT_KINDS, FAULT_RATES_PER_S, PAIR_SHARE
from tests.tools.named_tests import ROOT

DATA = ROOT / "tests" / "chaos" / "data"
DOC = ROOT / "docs" / "robustness.md"
SAMPLED = Path(__file__).with_name("data") / "mutation.json"  # `tests.tools.mutation` keeps it
_PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Rows = Mapping[tuple[type, Any], Callable[..., None]]


def state_table(rows: Rows) -> Iterator[str]:
    """Events down, states across; a cell is the function that the row runs."""
    events = list(dict.fromkeys(event for event, _ in rows))
    used = {state for _, state in rows}
    states = [state for state in type(next(iter(rows))[1]) if state in used]
    yield _row("event", *(str(state) for state in states))
    yield _row(*["---"] * (len(states) + 1))
    for event in events:
        yield _row(event.__name__, *(_cell(rows.get((event, state))) for state in states))


def _cell(function: Callable[..., None] | None) -> str:
    return "-" if function is None else function.__name__.strip("_").replace("_", " ")


def worlds_table(worlds: Mapping[str, Any]) -> Iterator[str]:
    yield _row("what happens", "faults, how often each", "shape")
    yield _row("---", "---", "---")
    for name, setting in worlds.items():
        faults = ", ".join(f"{fault} {count}" for fault, count in setting.faults.items()) or "none"
        shape = ", ".join(f"{key} {value}" for key, value in setting.shape.items())
        limit = getattr(setting, "max_states", None)
        yield _row(name, faults, ", ".join(filter(None, (shape, f"the first {limit} states" if limit else ""))))


def explored() -> Iterator[str]:
    """The last whole run of each world that is kept."""
    kept = {found["world"]: found for found in json.loads(EXPLORATION.read_text())} if EXPLORATION.exists() else {}
    yield _row("world", "states", "transitions", "ends", "date", "took", "memory")
    yield _row(*["---"] * 7)
    for name in deep_exploration.all_worlds():
        found = kept.get(name)
        if found is None:
            yield _row(name, "not kept yet", *["-"] * 5)
            continue
        bound = "" if found["is_complete"] else "the first "
        counts = (f"{bound}{found['states']:,}", f"{found['transitions']:,}", f"{found['ends']:,}")
        yield _row(name, *counts, found["date"], f"{found['seconds']:.0f} s", f"{found['megabytes']:,} MB")


def mutants_table() -> Iterator[str]:
    yield _row("planted fault", "in", "caught by")
    yield _row("---", "---", "---")
    for mutant in MUTANTS:
        yield _row(mutant.name, f"`{mutant.target}`", "; ".join(_catcher(name) for name in mutant.caught_by))


def mutation_scores() -> Iterator[str]:
    """What was kept of each area's last run."""
    if not SAMPLED.exists():
        yield "No run is kept yet."
        return
    yield _row("area", "seen", "date", "what no test saw")
    yield _row(*["---"] * 4)
    for name, score in json.loads(SAMPLED.read_text()).items():
        unseen = "; ".join(f"`{each}`" for each in score["unseen"]).replace("|", "or")
        yield _row(name, f"{score['seen']} of {score['planted']}", score["date"], unseen or "-")


def _catcher(name: str) -> str:
    return f"`{name}`" if name.startswith("tests/") else name


def faults_list() -> Iterator[str]:
    rates = ", ".join(f"{rate:g}" for rate in FAULT_RATES_PER_S)
    kinds = ", ".join(kind.replace("_", " ") for kind in FAULT_KINDS)
    yield f"{kinds}. Rates per second: {rates}. At the same instant a second one in {PAIR_SHARE:.0%} of cases."


def chaos_rows() -> Iterator[str]:
    yield _row("row", "of", "fault", "moment", "what must come of it", "how it is proven to have happened")
    yield _row(*["---"] * 6)
    for row in ROWS:
        yield _row(f"{row.number} {row.name}", row.component, row.fault, row.moment, row.expected, row.proof)


def chaos_measured(name: str) -> Iterator[str]:
    """The last run that was kept."""
    if not (DATA / name).exists():
        yield "No run is kept yet."
        return
    run = json.loads((DATA / name).read_text())
    dates = sorted({date for row in run["rows"] for date in row.get("date", run["date"]).split(" and ")})
    yield f"{' and '.join(dates)}, {run['machine']}."
    yield ""
    yield _row("row", "proof", "requests", "longest wait for a token", "whole again after", "verdict")
    yield _row(*["---"] * 6)
    for row in run["rows"]:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(row["outcomes"].items()))
        times = (f"{row['longest_pause_s']:.1f} s", f"{row['recovery_s']:.1f} s")
        yield _row(f"{row['number']} {row['name']}", row["proof"], counts, *times, row["verdict"])


def campaigns_measured() -> Iterator[str]:
    if not (DATA / "campaigns.json").exists():
        yield "No run is kept yet."
        return
    yield _row("date", "campaign", "requests", "what was found")
    yield _row(*["---"] * 4)
    for run in json.loads((DATA / "campaigns.json").read_text()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run["outcomes"].items()))
        yield _row(run["date"][:10], run["campaign"], counts, "; ".join(_found(run)))


def _found(run: Mapping[str, Any]) -> Iterator[str]:
    for role in ("prefill", "decode"):
        deaths = [death for death in run.get("deaths", ()) if death["role"] == role]
        pauses = [pause for death in deaths for pause in death["pauses_s"]]
        if deaths:
            yield f"{len(deaths)} {role} deaths, {len(pauses)} requests placed again{in_words(pauses)}"
    if "blocks_leaked" in run:
        yield f"{run['blocks_leaked']} blocks leaked, {len(run['holders'])} holders left"
    if "replaced" in run:
        yield f"{len(run['replaced'])} workers replaced, the longest wait for a token {run['longest_wait_s']:.1f} s"
    yield f"{len(run['problems'])} problems"


def soak_measured() -> Iterator[str]:
    if not (DATA / "soak.json").exists():
        yield "No run is kept yet."
        return
    run = json.loads((DATA / "soak.json").read_text())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run["outcomes"].items()))
    yield f"{run['date'][:10]}, {run['processors']} processors, {run['seconds']:g} s, seed {run['seed']}: {counts}."
    if "left_share" in run:
        yield (
            f"{run['left_share']:.0%} of the clients left before their answer was complete, "
            f"{run['left_before_first_token']} of them before its first token; the routers saw "
            f"{run['seen_leaving_by_routers']} leave."
        )
    if "floods" in run:
        yield (
            f"{run['floods']:,} floods of more requests than the router queues: {run['refused']:,} refused, "
            f"{run['left_floods']:,} left; {run['departures']:,} departures in all."
        )
    yield f"Faults: {', '.join(fault['name'] for fault in run['faults'])}."
    yield f"Problems: {'; '.join(run['problems']) or 'none'}."
    yield ""
    yield _row("", *(name for name in run["before"]))
    yield _row(*["---"] * (1 + len(run["before"])))
    for name in ("before", "after"):
        yield _row(f"{name} the faults", *(f"{value:g}" for value in run[name].values()))


def runbook() -> Iterator[str]:
    yield _row("fault", "what users see", "metrics", "log events", "the page", "what to do")
    yield _row(*["---"] * 6)
    for entry in RUNBOOK:
        yield _row(entry.fault, entry.users, entry.metrics, entry.logs, entry.page, entry.action)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "sender-transfers": lambda: state_table(sender.TRANSFER_ROWS),
    "sender-peers": lambda: state_table(sender.PEER_ROWS),
    "receiver-transfers": lambda: state_table(receiver.TRANSFER_ROWS),
    "receiver-attempts": lambda: state_table(receiver.ATTEMPT_ROWS),
    "receiver-peers": lambda: state_table(receiver.PEER_ROWS),
    "router-requests": lambda: state_table(router.REQUEST_ROWS),
    "router-attempts": lambda: state_table(router.OWN_ROWS),
    "router-decode": lambda: state_table(router.DECODE_ROWS),
    "router-prefill": lambda: state_table(router.PREFILL_ROWS),
    "handoff-worlds": lambda: worlds_table(handoff_worlds.WORLDS),
    "cluster-worlds": lambda: worlds_table(cluster_worlds.WORLDS),
    "explored": explored,
    "faults": faults_list,
    "mutants": mutants_table,
    "mutation": mutation_scores,
    "chaos-rows": chaos_rows,
    "chaos-measured": lambda: chaos_measured("chaos.json"),
    "chaos-demo-measured": lambda: chaos_measured("chaos-demo.json"),
    "campaigns-measured": campaigns_measured,
    "soak-measured": soak_measured,
    "runbook": runbook,
}


def generated(text: str) -> str:
    """`text` with every generated part as the code has it now. Raises KeyError for a part without a generator."""

    def part(match: re.Match[str]) -> str:
        return match[1] + "\n".join(PARTS[match["name"]]()) + "\n" + match[3]

    return _PART.sub(part, text)


def names_of_parts(text: str) -> list[str]:
    return [match["name"] for match in _PART.finditer(text)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    text = DOC.read_text()
    if "--write" in arguments:
        DOC.write_text(generated(text))
        return 0
    if generated(text) != text:
        print(f"{DOC.relative_to(ROOT)} is stale: python -m tests.tools.robustness_doc --write")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
