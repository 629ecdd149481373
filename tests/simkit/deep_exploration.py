"""`make explore`: larger handoffs than the tests explore. Prints what was visited; exits 1 with the shortest story."""

import time

from tests.simkit.explorer import Violation, explore
from tests.simkit.handoff_world import Budget, HandoffWorld

MAX_STATES = 2_000_000
WORLDS: tuple[tuple[str, Budget, dict[str, int]], ...] = (
    ("two tries, a session breaks", Budget(breaks=1), {"num_tries": 2}),
    ("two prefill workers, a session breaks", Budget(breaks=1), {"num_tries": 2, "num_senders": 2}),
    ("a session breaks and the decode worker cancels", Budget(breaks=1, receiver_cancels=1), {}),
    ("a session breaks and the prefill worker cancels", Budget(breaks=1, sender_cancels=1), {}),
    ("corrupt chunk, then another try", Budget(corruptions=1), {"num_tries": 2}),
    ("both sides cancel", Budget(sender_cancels=1, receiver_cancels=1), {}),
    ("the decode worker freezes while the prefill worker cancels", Budget(freezes=1, sender_cancels=1), {}),
    ("deadline and break", Budget(deadlines=1, breaks=1), {}),
)


def main() -> int:
    for name, budget, shape in WORLDS:
        started_s = time.monotonic()
        try:
            result = explore(HandoffWorld(budget, **shape), MAX_STATES)
        except Violation as violation:
            print(f"{name}: {violation}")
            return 1
        scope = "all" if result.is_complete else "the first"
        print(
            f"{name}: {scope} {result.num_states} states, {result.num_transitions} transitions, "
            f"{result.num_quiet} ends, {time.monotonic() - started_s:.0f} s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
