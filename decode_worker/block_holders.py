"""What the attempts of a decode worker hold. Pure: no IO."""

from collections.abc import Iterable

from common.values.messages import BlockHolder
from decode_worker.attempt import Attempt
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequencePhase


def holders_of(attempts: Iterable[Attempt], scheduler: DecodeScheduler, now_s: float) -> list[BlockHolder]:
    """Every attempt that has blocks, then ended sequences whose blocks the running step still touches."""
    held = [_of_attempt(attempt, now_s) for attempt in attempts]
    ended = [_of_ended(sequence) for sequence in scheduler.in_step if sequence.phase is SequencePhase.ENDED]
    return [holder for holder in (*held, *ended) if holder.num_blocks]


def _of_attempt(attempt: Attempt, now_s: float) -> BlockHolder:
    blocks = {*attempt.block_table, *(block for sequence in attempt.sequences for block in sequence.block_table)}
    phase, age_s, time_left_s = str(attempt.phase), now_s - attempt.arrived_s, attempt.deadline_s - now_s
    return BlockHolder(attempt.attempt_id, phase, len(blocks), age_s, time_left_s)


def _of_ended(sequence: Sequence) -> BlockHolder:
    """It goes with the step, which a worker's health watches."""
    return BlockHolder(sequence.work.attempt_id, "ended, in a step", len(set(sequence.block_table)), 0.0, 0.0)
