"""The router's picture of one worker: what it reported, and what we placed on it. Pure: no IO."""

import math
from dataclasses import astuple, dataclass, field, replace

from common.values.ids import AttemptId, WorkerRef
from common.values.messages import Role, WorkerInfo, WorkerState, WorkerStats
from router.core.events import PrefixKey

FIRST_BACKOFF_S = 0.1
ADAPTER_PAUSE_S = 0.5
MAX_BACKOFF_S = 2.0


@dataclass(slots=True)
class Load:
    """A quantity on a worker: what it reported last plus what we did since, at least what is ours."""

    own: int = 0
    reported: int = 0
    since_report: int = 0

    @property
    def value(self) -> int:
        return max(self.own, self.reported + self.since_report)

    def add(self, amount: int) -> None:
        self.own += amount
        self.since_report += amount

    def report(self, amount: int) -> None:
        self.reported = amount
        self.since_report = 0


@dataclass(slots=True)
class Share:
    """What one attempt of ours takes of a worker."""

    placed_s: float
    tokens: int  # that it still has to compute
    blocks: int  # of a decode worker
    unplaced_tokens: int  # of a decode worker: that some prefill worker will have to compute


@dataclass(slots=True)
class Worker:
    """One life of a worker with an open stream. Mutated by the router core alone."""

    info: WorkerInfo
    address: str
    stats: WorkerStats
    heard_s: float  # when it last said anything
    reported_s: float | None = None  # when it last said how it is, in numbers that can be
    is_draining: bool = False
    tokens: Load = field(default_factory=Load)
    blocks: Load = field(default_factory=Load)
    sequences: Load = field(default_factory=Load)
    unplaced_tokens: int = 0  # of all shares
    shares: dict[AttemptId, Share] = field(default_factory=dict)
    num_refusals: int = 0  # since it last took something
    refused_s: float = float("-inf")  # when it last did
    closed_until_s: float = 0.0  # no new work before
    adapter_pauses: dict[str, float] = field(default_factory=dict)  # digest of what it had no room for -> when to ask
    last_chosen: int = 0  # ordinal of the router's decision
    recent_placements: float = 0.0  # decays, see policy.decayed
    recent_at_s: float = 0.0

    @property
    def ref(self) -> WorkerRef:
        return self.info.ref

    @property
    def num_ranks(self) -> int:
        """Processes that run its model together."""
        return max(1, len(self.info.ranks))

    @property
    def is_decode(self) -> bool:
        return self.info.role is Role.DECODE

    @property
    def prefix_key(self) -> PrefixKey:
        return PrefixKey(self.info.fingerprint, self.info.block_size)

    @property
    def is_ready(self) -> bool:
        """Takes new work, if not at this moment then soon. Its stream says so: a missing lease may be Redis's loss."""
        return self.stats.state is WorkerState.READY and not self.is_draining

    @property
    def state(self) -> WorkerState:
        """As shown to people: a worker that gets no new work is draining, on whichever decision."""
        if self.stats.state is WorkerState.READY and not self.is_ready:
            return WorkerState.DRAINING
        return self.stats.state

    def place(
        self, attempt_id: AttemptId, now_s: float, *, tokens: int = 0, blocks: int = 0, unplaced_tokens: int = 0
    ) -> None:
        assert attempt_id not in self.shares, f"{attempt_id} is on {self.ref} already"
        self.shares[attempt_id] = Share(now_s, tokens, blocks, unplaced_tokens)
        self.unplaced_tokens += unplaced_tokens
        self.tokens.add(tokens)
        self.blocks.add(blocks)
        self.sequences.add(1)

    def tokens_computed(self, attempt_id: AttemptId) -> None:
        """The prompt of an attempt is computed, or not to be computed here; the worker holds it all the same."""
        share = self.shares[attempt_id]
        self.tokens.add(-share.tokens)
        share.tokens = 0

    def tokens_placed(self, attempt_id: AttemptId) -> None:
        """Somebody computes the prompt now."""
        share = self.shares[attempt_id]
        self.unplaced_tokens -= share.unplaced_tokens
        share.unplaced_tokens = 0

    def release(self, attempt_id: AttemptId) -> None:
        self.tokens_placed(attempt_id)
        share = self.shares.pop(attempt_id)
        self.tokens.add(-share.tokens)
        self.blocks.add(-share.blocks)
        self.sequences.add(-1)

    def report(self, stats: WorkerStats, now_s: float) -> None:
        """Take over what the worker says; room that it did not have when it refused opens it again.

        Of numbers that no worker has only the state is believed: the load is what it was, and grows old.
        """
        if not _is_plausible(stats):
            self.stats = replace(self.stats, state=stats.state)
            return
        self.reported_s = now_s
        if (self.num_refusals or self.adapter_pauses) and _has_more_room(stats, self.stats):
            self.reopen()
        self.stats = stats
        self.tokens.report(stats.num_waiting_uncached_tokens)
        self.blocks.report(stats.kv_blocks_used + stats.kv_blocks_held)
        self.sequences.report(stats.num_running + stats.num_waiting)

    def refused(self, attempt_id: AttemptId, now_s: float) -> None:
        """It has no room for an attempt, or failed it: leave it alone for a while that doubles.

        What was asked for before the last refusal counts with that one: a burst is refused as a whole.
        """
        if self.shares[attempt_id].placed_s > self.refused_s:
            self.num_refusals += 1
            self.refused_s = now_s
            self.close(now_s)

    def close(self, now_s: float) -> None:
        """No new work for a while, as long as it has not taken anything since it refused."""
        backoff_s: float = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.num_refusals - 1, 10))
        self.closed_until_s = now_s + backoff_s

    def reopen(self) -> None:
        """Something has ended there: it may have room again."""
        self.closed_until_s = 0.0
        self.adapter_pauses = dict.fromkeys(self.adapter_pauses, 0.0)

    def refused_adapter(self, digest: str, now_s: float) -> None:
        """It had no room for work with an adapter, perhaps for nothing but the adapter: other work goes on."""
        self.adapter_pauses[digest] = now_s + ADAPTER_PAUSE_S

    def takes_adapter(self, digest: str, now_s: float) -> bool:
        return now_s >= self.adapter_pauses.get(digest, 0.0)

    def accepted(self, adapter: str = "") -> None:
        """It has taken work with the adapter of that digest; "" = without one."""
        self.adapter_pauses.pop(adapter, None)
        self.num_refusals = 0
        self.closed_until_s = 0.0


def _is_plausible(stats: WorkerStats) -> bool:
    numbers = (*astuple(replace(stats, state=WorkerState.READY, ranks_silent_s=()))[1:-1], *stats.ranks_silent_s)
    return all(math.isfinite(number) and number >= 0 for number in numbers)


def _has_more_room(stats: WorkerStats, before: WorkerStats) -> bool:
    free = stats.kv_blocks_free + stats.kv_blocks_cached
    free_before = before.kv_blocks_free + before.kv_blocks_cached
    return free > free_before or stats.num_waiting < before.num_waiting
