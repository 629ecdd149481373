"""The small clusters that are explored: in the tests, and larger ones on demand."""

from dataclasses import dataclass, field
from typing import Any

from tests.simkit.cluster_world import ClusterWorld
from tests.simkit.explorer import Exploration, Progress, explore


@dataclass(frozen=True, slots=True)
class Setting:
    """`max_states` None: all of them. A bounded search sees every story up to some length, as it goes breadth first."""

    faults: dict[str, int] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    max_states: int | None = None

    def explore(self, max_states: int | None = None, *progress: Progress) -> Exploration:
        return explore(ClusterWorld(self.faults, **self.shape), max_states or self.max_states or 10**9, *progress)


_ONE_CHUNK = {"chunk_tokens": 2}
_SCORED = {"is_scored": True, **_ONE_CHUNK}

WORLDS = {
    "no fault": Setting(),
    "the first token is the last": Setting({}, {"max_tokens": 1, **_ONE_CHUNK}),
    "a session breaks": Setting({"break": 1}, _ONE_CHUNK),
    "the client leaves": Setting({"leave": 1}, _ONE_CHUNK),
    "the prefill worker dies": Setting({"crash_prefill": 1}, _ONE_CHUNK, max_states=2500),
    "the decode worker dies": Setting({"crash_decode": 1}, _ONE_CHUNK, max_states=2500),
    "a router stream is cut": Setting({"cut": 1}, _ONE_CHUNK, max_states=2500),
    "two prefill workers, one dies": Setting({"crash_prefill": 1}, {"num_prefill": 2, **_ONE_CHUNK}, max_states=1500),
    "Redis is in trouble": Setting({"redis": 1}, _ONE_CHUNK),
    "Redis is in trouble, the first token is the last": Setting(
        {"redis": 1}, {"max_tokens": 1, **_ONE_CHUNK}, max_states=800
    ),
    "logprobs of the prompt": Setting({}, {"is_scored": True}),
    "logprobs of the prompt, its worker dies": Setting({"crash_prefill": 1}, _SCORED, max_states=2500),
    "logprobs of the prompt, a router stream is cut": Setting({"cut": 1}, _SCORED, max_states=2500),
}

# For `make explore`.
DEEP_WORLDS = {
    "two chunks, the first token is the last": Setting({}, {"max_tokens": 1}),
    "two chunks, a session breaks": Setting({"break": 1}),
    "two chunks, the client leaves": Setting({"leave": 1}),
    "the prefill worker dies": Setting({"crash_prefill": 1}, _ONE_CHUNK),
    "the decode worker dies": Setting({"crash_decode": 1}, _ONE_CHUNK),
    "a router stream is cut": Setting({"cut": 1}, _ONE_CHUNK),
    "two prefill workers, one dies": Setting({"crash_prefill": 1}, {"num_prefill": 2, **_ONE_CHUNK}),
    "two decode workers, one dies": Setting({"crash_decode": 1}, {"num_decode": 2, **_ONE_CHUNK}),
    "Redis is in trouble, the first token is the last": Setting({"redis": 1}, {"max_tokens": 1, **_ONE_CHUNK}),
    "logprobs of the prompt, its worker dies": Setting({"crash_prefill": 1}, _SCORED),
    "logprobs of the prompt, the decode worker dies": Setting({"crash_decode": 1}, _SCORED),
    "logprobs of the prompt, a router stream is cut": Setting({"cut": 1}, _SCORED),
    "the client leaves while a session breaks": Setting({"leave": 1, "break": 1}, _ONE_CHUNK),
}
