"""The order in which a prefill worker computes prompts. Pure: no IO."""

from common.cores.fair_shares import FairShares
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence, SequencePhase, by_tenant

MAX_SHORT_STEPS = 4
MAX_OVERTAKEN = 16
# Waiting prompts that may fail to get blocks per step, before the search ends: bounds a step's planning time.
MAX_BLOCKED = 8


class PrefillPolicy:
    """Per step, within the token budget:

    * Tenants take turns, by the tokens computed for each; one alone gets everything.
    * Within a tenant strictly by priority. Within one priority, prompts that one step can finish go first, then the
      long ones, each in arrival order: a long prompt delays a short one by the chunk that is running when it arrives.
    * After `MAX_SHORT_STEPS` steps in which long prompts got next to nothing, the first of them goes first once.
    * A prompt gets all of its blocks when it is first scheduled: no two half-allocated prompts wait for each other.
    * One that finds no blocks may be overtaken by smaller ones, `MAX_OVERTAKEN` times; then they wait for it.
    """

    watermark = 0.0  # prompts do not grow

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_tokens = max_num_batched_tokens
        self._num_short_steps = 0  # in a row, while a long prompt was there
        self._shares = FairShares()

    def fill(self, scheduler: Scheduler) -> None:
        blocked: list[Sequence] = []
        lines = by_tenant(self._in_order([*scheduler.waiting, *scheduler.running]))
        self._shares.begin(lines)
        for sequence in self._shares.in_turn(lines):
            if not scheduler.has_room:
                return
            if sequence.phase is SequencePhase.RUNNING or self._admit(scheduler, sequence, blocked):
                is_long = self._is_long(sequence)
                num_tokens = scheduler.prefill(sequence, self._max_num_tokens)
                self._shares.charge(sequence.work.tenant, num_tokens)
                if is_long and num_tokens >= self._max_num_tokens // 8:
                    self._num_short_steps = 0

    def _in_order(self, sequences: list[Sequence]) -> list[Sequence]:
        """Most urgent first."""
        long = [sequence for sequence in sequences if self._is_long(sequence)]
        first_long = min(long, key=lambda sequence: sequence.rank, default=None)
        self._num_short_steps = self._num_short_steps + 1 if first_long else 0
        favoured = first_long if self._num_short_steps > MAX_SHORT_STEPS else None

        def urgency(sequence: Sequence) -> tuple[int, bool, bool, int]:
            priority, order, _ = sequence.rank
            is_favoured = sequence is favoured
            return priority, not is_favoured, not is_favoured and self._is_long(sequence), order

        return sorted(sequences, key=urgency)

    def _admit(self, scheduler: Scheduler, sequence: Sequence, blocked: list[Sequence]) -> bool:
        if len(blocked) >= MAX_BLOCKED or any(other.num_overtaken >= MAX_OVERTAKEN for other in blocked):
            return False
        if not scheduler.admit(sequence):
            blocked.append(sequence)
            return False
        for other in blocked:
            other.num_overtaken += 1
        return True

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_remaining > self._max_num_tokens
