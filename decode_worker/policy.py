"""The order and the pace at which a decode worker computes tokens. Pure: no IO."""

from common.cores.fair_shares import OUTPUT_WEIGHT, FairShares
from common.engine.scheduling.scheduler import Limits, Scheduler
from common.engine.scheduling.sequence import Sequence, SequencePhase, by_tenant
from common.engine.scheduling.step_rate import StepRate
from decode_worker.drafting.speculation import Speculation

# Prompt tokens of a step when there are any; fewer would read all weights for next to nothing.
MIN_CHUNK = 16
# Before anything was measured: small, as the first step may be slow.
FIRST_CHUNK = 32


class DecodePolicy:
    """Continuous batching. Per step:

    1. Waiting sequences take free slots: tenants in turns, by rank within one. One without blocks (preempted) needs
       them for all of its tokens first; those that have theirs may pass it, and older ones that have them always do.
       So may one whose parked siblings have blocks: nobody else gets those before it is computed.
    2. Every running sequence that needs one token gets it, by rank; the youngest makes room when blocks run out.
    3. What is left of the token budget goes to prefill chunks, in the same order, within what `ChunkBudget` grants.
    4. Where there is no prompt to compute, drafts are verified beside the tokens, as far as that makes it faster.

    Progress: the oldest running sequence can take every block but the reserved ones; reservations end by themselves.
    """

    watermark = 0.01  # so that running sequences can grow without preempting at once

    def __init__(self, limits: Limits) -> None:
        self.chunk_budget = ChunkBudget(limits.gap_budget_s, limits.max_num_batched_tokens)
        # Never more sequences than tokens in a step: so a prefill chunk always finds room beside the decoding ones.
        self._max_num_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._shares = FairShares()
        self.speculation = Speculation(limits.max_draft_tokens) if limits.max_draft_tokens else None

    def fill(self, scheduler: Scheduler) -> None:
        self._shares.begin({sequence.work.tenant for sequence in (*scheduler.waiting, *scheduler.running)})
        self._admit(scheduler)
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in sorted(scheduler.running, key=_rank):
            (decoding if sequence.is_decoding else prompts).append(sequence)
        for sequence in decoding:
            if sequence.phase is SequencePhase.RUNNING:  # not preempted for an older one
                scheduler.decode(sequence)
                self._shares.charge(sequence.work.tenant, OUTPUT_WEIGHT)
        num_tokens = self.chunk_budget.chunk_tokens(scheduler.rate, scheduler.num_decoding)
        for sequence in self._shares.in_turn(by_tenant(prompts)):
            if sequence.phase is SequencePhase.RUNNING:
                num_chunk_tokens = scheduler.prefill(sequence, num_tokens)
                num_tokens -= num_chunk_tokens
                self._shares.charge(sequence.work.tenant, num_chunk_tokens)
        if self.speculation is not None:
            self.speculation.fill(scheduler)

    def prefill_tokens_per_s(self, scheduler: Scheduler) -> float:
        """How fast a prompt would be computed beside what runs now; 0.0 until one was."""
        num_decoding = sum(sequence.is_decoding for sequence in scheduler.running)
        return self.chunk_budget.prefill_tokens_per_s(scheduler.rate, num_decoding)

    def _admit(self, scheduler: Scheduler) -> None:
        is_short_of_blocks = False
        for sequence in self._shares.in_turn(by_tenant(sorted(scheduler.waiting, key=_rank))):
            if len(scheduler.running) >= self._max_num_running:
                return
            is_behind = is_short_of_blocks or _has_older(scheduler, sequence)
            if is_behind and not sequence.block_tables and not scheduler.is_awaited(sequence):
                continue
            is_short_of_blocks |= not scheduler.admit(sequence)


class ChunkBudget:
    """How many prompt tokens a step takes beside its streams: what keeps their gaps within a budget.

    A step gets as many prompt tokens as should end within it, never fewer than `MIN_CHUNK`, so that prompts go on
    whatever the streams take. A step that takes too long lowers the measured speed, and with it the next chunk.
    `gap_budget_s` = 0: steps are as large as `max_num_tokens` allows.
    """

    def __init__(self, gap_budget_s: float, max_num_tokens: int) -> None:
        self._gap_budget_s = gap_budget_s
        self._max_num_tokens = max_num_tokens

    def chunk_tokens(self, rate: StepRate, num_decoding: int) -> int:
        """Prompt tokens of a step beside so many decoding sequences; what the step has room for is another bound."""
        if self._gap_budget_s == 0.0:
            return self._max_num_tokens
        if rate.prefill_tokens_per_s == 0.0:
            return FIRST_CHUNK
        left_s = self._gap_budget_s - (rate.decode_s if num_decoding else 0.0)
        return min(max(MIN_CHUNK, int(left_s * rate.prefill_tokens_per_s)), self._max_num_tokens)

    def prefill_tokens_per_s(self, rate: StepRate, num_decoding: int) -> float:
        """How fast a prompt would be computed beside so many decoding sequences; 0.0 until one was."""
        if num_decoding == 0 or rate.prefill_tokens_per_s == 0.0:
            return rate.prefill_tokens_per_s
        num_tokens = self.chunk_tokens(rate, num_decoding)
        return num_tokens / (rate.decode_s + num_tokens / rate.prefill_tokens_per_s)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _has_older(scheduler: Scheduler, sequence: Sequence) -> bool:
    """Whether it was preempted for an older one that waits with its blocks: then that one's turn comes first."""
    return any(other.rank < sequence.rank for other in scheduler.idle_with_blocks)
