"""`make explore`: more than the tests explore. Prints what was visited; exits 1 with the shortest story.

Arguments choose worlds by a part of their names: `python -m tests.simkit.deep_exploration "session breaks"`.
"""

import sys
import time
from typing import Any

from tests.simkit import cluster_worlds, handoff_worlds
from tests.simkit.explorer import Violation

MAX_STATES = 1_000_000


def main() -> int:
    handoffs: dict[str, Any] = {f"handoff: {name}": setting for name, setting in handoff_worlds.DEEP_WORLDS.items()}
    clusters: dict[str, Any] = {f"cluster: {name}": setting for name, setting in cluster_worlds.DEEP_WORLDS.items()}
    chosen = sys.argv[1:] or [""]
    for name, setting in {**clusters, **handoffs}.items():
        if not any(part in name for part in chosen):
            continue
        started_s = time.monotonic()
        try:
            result = setting.explore(MAX_STATES)
        except Violation as violation:
            print(f"{name}: {violation}")
            return 1
        scope = "all" if result.is_complete else "the first"
        print(
            f"{name}: {scope} {result.num_states} states, {result.num_transitions} transitions, "
            f"{result.num_quiet} ends, {time.monotonic() - started_s:.0f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
