"""`make explore`: every world whole, one after another, each in a process of its own. Exits 1 with the shortest story.

`python -m tests.simkit.deep_exploration "session breaks"` chooses worlds by a part of their names, `--missing` those
that are not kept, `--jobs 2` runs two at a time. Counts go to `build/exploration.json`; with `--keep` also to
`tests/simkit/data`, from which `docs/robustness.md` is drawn. Worlds without bound take from seconds to an hour and up
to some gigabytes: what was kept says how much.
"""

import argparse
import datetime
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.simkit import cluster_worlds, handoff_worlds
from tests.simkit.explorer import Exploration, Violation

OUTPUT, KEPT = Path("build/exploration.json"), Path(__file__).with_name("data") / "exploration.json"
SAY_EVERY_S = 15.0
Found = dict[str, Any]


def all_worlds() -> dict[str, Any]:
    """By name; a world that the tests explore in part is here whole."""
    handoffs = {**handoff_worlds.WORLDS, **{f"{name} (large)": w for name, w in handoff_worlds.DEEP_WORLDS.items()}}
    clusters = {**cluster_worlds.WORLDS, **cluster_worlds.DEEP_WORLDS}
    return {
        **{f"handoff: {name}": world for name, world in handoffs.items()},
        **{f"cluster: {name}": world for name, world in clusters.items()},
    }


def explore_world(name: str, max_states: int) -> Found:
    """What one world has. Raises Violation."""
    started_s = said_s = time.monotonic()

    def say_now_and_then(so_far: Exploration, num_waiting: int) -> None:
        nonlocal said_s
        if time.monotonic() > said_s + SAY_EVERY_S:
            said_s = time.monotonic()
            _say(f"  {name}: {so_far.num_states} states, {num_waiting} to be expanded, {said_s - started_s:.0f} s")

    result = all_worlds()[name].explore(max_states, say_now_and_then)
    return {
        "world": name,
        "states": result.num_states,
        "transitions": result.num_transitions,
        "ends": result.num_quiet,
        "is_complete": result.is_complete,
        "seconds": round(time.monotonic() - started_s, 1),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def explore_all(names: Sequence[str], max_states: int, jobs: int) -> Iterator[Found]:
    """As they end: a world of an hour must not keep the smaller ones' counts from being kept."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        try:
            for future in as_completed([pool.submit(explore_world, name, max_states) for name in names]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # a violation is reported without the worlds that have not begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simkit.deep_exploration", description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of names of worlds")
    parser.add_argument("--missing", action="store_true", help="only worlds that are not kept whole")
    parser.add_argument("--keep", action="store_true", help="keep the counts, and draw docs/robustness.md again")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--max-states", type=int, default=20_000_000)
    options = parser.parse_args(arguments)
    kept = {found["world"] for found in _read(KEPT) if found["is_complete"]} if options.missing else set()
    chosen = [name for name in all_worlds() if name not in kept and any(part in name for part in options.parts or [""])]
    started_s = time.monotonic()
    try:
        for number, found in enumerate(explore_all(chosen, options.max_states, options.jobs), 1):
            print(f"{number}/{len(chosen)} {in_words(found)}", flush=True)
            for path in (OUTPUT, KEPT) if options.keep else (OUTPUT,):
                add(path, found)
    except Violation as violation:
        print(violation)
        return 1
    print(f"{len(chosen)} worlds in {time.monotonic() - started_s:.0f} s")
    if options.keep:
        from tests.tools import robustness_doc

        robustness_doc.main(["--write"])
    return 0


def in_words(found: Found) -> str:
    scope = "all" if found["is_complete"] else "the first"
    return (
        f"{found['world']}: {scope} {found['states']} states, {found['transitions']} transitions, "
        f"{found['ends']} ends, {found['seconds']:.0f} s, {found['megabytes']} MB"
    )


def add(path: Path, found: Found) -> None:
    """Each world once, in the order of `all_worlds`; what is no longer a world is dropped."""
    by_name = {each["world"]: each for each in [*_read(path), found]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([by_name[name] for name in all_worlds() if name in by_name], indent=1) + "\n")


def _read(path: Path) -> list[Found]:
    return json.loads(path.read_text()) if path.exists() else []


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
