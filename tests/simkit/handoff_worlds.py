"""The handoffs that are explored: in the tests, and larger ones on demand."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtransfer.receiver import state as receiver_state
from tests.simkit.explorer import Exploration, Progress, explore
from tests.simkit.handoff_world import HandoffWorld


@dataclass(frozen=True, slots=True)
class Setting:
    """A world to explore. `max_refused`: how many refusals a receiver remembers; 0 means that it forgets each."""

    faults: dict[str, int] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    max_refused: int | None = None

    def explore(self, max_states: int, *progress: Progress) -> Exploration:
        with pytest.MonkeyPatch.context() as patch:
            if self.max_refused is not None:
                patch.setattr(receiver_state, "MAX_REFUSED_PER_PEER", self.max_refused)
            return explore(HandoffWorld(self.faults, **self.shape), max_states, *progress)


_SHORT = {"num_tokens": 1}

WORLDS = {
    "no fault": Setting(),
    "session breaks": Setting({"break": 1}),
    "session breaks, another try": Setting({"break": 1}, {"num_tries": 2, **_SHORT}),
    "chunk arrives corrupt": Setting({"corrupt": 1}),
    "prefill worker cancels": Setting({"cancel_prefill": 1}),
    "decode worker cancels": Setting({"withdraw": 1}),
    "decode worker freezes": Setting({"freeze": 1}),
    "deadline passes early": Setting({"deadline": 1}),
    "prefill worker dies and comes back": Setting({"crash_sender": 1}, {"num_tries": 2, **_SHORT}),
    "decode worker dies and comes back": Setting({"crash_receiver": 1}, _SHORT),
    "loss is reported twice": Setting({"break": 1, "lose_again": 1}, _SHORT),
    "acknowledged early": Setting({"early_ack": 1}),
    "acknowledged early and cancelled": Setting({"early_ack": 1, "cancel_prefill": 1}, _SHORT),
    "malformed announcement": Setting({"malform": 1}, _SHORT),
    "both cancel, twice": Setting({"cancel_prefill": 2, "withdraw": 2}, _SHORT),
    "granted after the announcement": Setting(
        {"cancel_prefill": 1}, {"is_granted_late": True, **_SHORT}, max_refused=0
    ),
    "two requests": Setting({}, {"num_requests": 2, **_SHORT}),
    "two ranks": Setting({}, {"num_ranks": 2}),
    "two ranks, session breaks": Setting({"break": 1}, {"num_ranks": 2, **_SHORT}),
    "two ranks, prefill worker cancels": Setting({"cancel_prefill": 1}, {"num_ranks": 2, **_SHORT}),
}

# For `make explore`.
DEEP_WORLDS = {
    "two prefill workers": Setting({}, {"num_requests": 2, "num_senders": 2, **_SHORT}),
    "a session breaks, another try": Setting({"break": 1}, {"num_tries": 2}),
    "two prefill workers, a session breaks": Setting({"break": 1}, {"num_tries": 2, "num_senders": 2}),
    "prefill worker dies and comes back": Setting({"crash_sender": 1}, {"num_tries": 2}),
    "decode worker dies and comes back": Setting({"crash_receiver": 1}),
    "a session breaks and the decode worker cancels": Setting({"break": 1, "withdraw": 1}),
    "a session breaks and the prefill worker cancels": Setting({"break": 1, "cancel_prefill": 1}),
    "corrupt chunk, then another try": Setting({"corrupt": 1}, {"num_tries": 2}),
    "both sides cancel": Setting({"cancel_prefill": 1, "withdraw": 1}),
    "the decode worker freezes while the prefill worker cancels": Setting({"freeze": 1, "cancel_prefill": 1}),
    "deadline and break": Setting({"deadline": 1, "break": 1}),
    "malformed announcement, then another try": Setting({"malform": 1}, {"num_tries": 2, **_SHORT}),
    "two requests, one is cancelled": Setting({"cancel_prefill": 1}, {"num_requests": 2, **_SHORT}),
    "the prefill worker dies twice": Setting({"crash_sender": 2}, {"num_tries": 3, **_SHORT}),
}
