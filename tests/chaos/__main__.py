"""`python -m tests.chaos`: the fault list on real clusters; prints the table, writes `build/chaos.json`.

`--only NAMES` takes rows by name, by the beginning of a name, or by their number in the fault matrix; `--short` takes
what CI runs; `--model demo` asks the real demo model, which takes longer. Exit code 1 when a promise was broken or a
fault was not proven.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.checkpoint.demo_model import fetch_demo_model
from tests.chaos.kept import keep
from tests.chaos.questions import golden_questions, questions_for_chaos
from tests.chaos.rows import ROWS, rows_named
from tests.chaos.run import Result, run_rows, table
from tests.tiny_model import write_tiny_model
from tests.tools.robustness_doc import DATA


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", "--rows", dest="only", default="", help="rows, comma-separated")
    parser.add_argument("--short", action="store_true", help="the rows that CI runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=("tiny", "demo"), default="tiny")
    parser.add_argument("--add", action="store_true", help="leave the other rows of the output as they are")
    parser.add_argument("--keep", action="store_true", help="keep the result, and draw docs/robustness.md again")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    options = parser.parse_args(arguments)
    rows = rows_named(options.only) if options.only else tuple(row for row in ROWS if row.is_short or not options.short)
    if options.list:
        print("\n".join(f"{row.number:3} {row.name}: {row.component}, {row.fault}, {row.moment}" for row in rows))
        return 0
    output = Path(f"build/chaos{'-demo' if options.model == 'demo' else ''}.json")
    results: list[Result] = []
    kept = _rows_kept(output) if options.add else {}
    with tempfile.TemporaryDirectory() as folder:
        model = fetch_demo_model(_say) if options.model == "demo" else write_tiny_model(Path(folder) / "tiny")
        is_demo = options.model == "demo"
        questions = golden_questions(model) if is_demo else questions_for_chaos(model, options.seed)
        for result in run_rows(model, questions, rows, _say):
            results.append(result)
            _say(f"  {result.verdict}; {result.proof}; {result.outcomes}; recovered after {result.recovery_s:.1f} s")
            _say("".join(f"  {problem}\n" for problem in result.problems[:5]).rstrip() or "  no problem")
            kept[result.name] = {**result.as_dict(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
            _write(output, kept, options.seed)
    print("\n".join(table(rows, results)))
    if options.keep:
        keep(output)
    return 0 if all(result.verdict == "as promised" for result in results) and len(results) == len(rows) else 1


def _rows_kept(output: Path) -> dict[str, dict[str, object]]:
    """What an earlier run has written, or else what is kept."""
    source = output if output.exists() else DATA / output.name
    return {row["name"]: row for row in json.loads(source.read_text())["rows"]} if source.exists() else {}


def _write(output: Path, kept: Mapping[str, dict[str, object]], seed: int) -> None:
    output.parent.mkdir(exist_ok=True)
    order = [row.name for row in ROWS]
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, Linux {platform.release().partition('-')[0]}",
        "seed": seed,
        "rows": sorted(kept.values(), key=lambda row: order.index(str(row["name"]))),
    }
    output.write_text(json.dumps(report, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
