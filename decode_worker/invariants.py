"""What must hold on a decode worker between any two events. Pure: no IO."""

from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.ids import AttemptId
from decode_worker.attempt import Attempt, AttemptPhase
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequencePhase


def check_attempts(pool: BlockPool, scheduler: DecodeScheduler, attempts: Mapping[AttemptId, Attempt]) -> None:
    """Every reference on a block has its owner, every sequence one place, and what can go on does."""
    placed = (*scheduler.waiting, *scheduler.running)
    ended = tuple(s for s in scheduler.in_step if s.phase is SequencePhase.ENDED)
    _check_references(pool, [s.block_table for s in (*placed, *ended)], attempts)
    owned = [sequence for attempt in attempts.values() for sequence in attempt.sequences]
    assert Counter(map(id, placed)) == Counter(map(id, owned)), "a sequence in two places, or in none"
    for attempt in attempts.values():
        _check_attempt(attempt)
    for sequence in (*placed, *ended):
        _check_sequence(sequence, pool, scheduler)
    _check_progress(scheduler, attempts)


def _check_references(
    pool: BlockPool, used_tables: list[tuple[int, ...]], attempts: Mapping[AttemptId, Attempt]
) -> None:
    used = Counter(block for table in used_tables for block in table)
    held = Counter(block for attempt in attempts.values() for block in attempt.block_table)
    for block in range(pool.num_blocks):
        assert pool.num_refs(block, RefKind.USED) == used[block], f"block {block} is used without an owner"
        assert pool.num_refs(block, RefKind.HELD) == held[block], f"block {block} is held without an owner"


def _check_attempt(attempt: Attempt) -> None:
    match attempt.phase:
        case AttemptPhase.RESERVED:
            assert attempt.block_table, str(attempt)
            assert not attempt.sequences, str(attempt)
            assert attempt.live_choices, str(attempt)
        case AttemptPhase.READY:
            assert not attempt.block_table, str(attempt)
            assert attempt.live_choices, str(attempt)
            generated = {choice for sequence in attempt.sequences for choice in sequence.choices}
            assert generated >= attempt.live_choices, str(attempt)
            assert attempt.has_first_tokens or len(attempt.sequences) == 1, str(attempt)
        case AttemptPhase.ENDING:
            assert attempt.block_table, str(attempt)
            assert not attempt.sequences, str(attempt)
        case _:
            assert_never(attempt.phase)


def _check_sequence(sequence: Sequence, pool: BlockPool, scheduler: DecodeScheduler) -> None:
    assert (sequence in scheduler.waiting) == (sequence.phase is SequencePhase.WAITING), str(sequence)
    assert (sequence in scheduler.running) == (sequence.phase is SequencePhase.RUNNING), str(sequence)
    assert (sequence in scheduler.in_step) == (sequence.num_scheduled > 0), str(sequence)
    assert 0 <= sequence.num_computed < len(sequence.token_ids), str(sequence)
    num_tokens = sequence.num_computed + sequence.num_scheduled
    assert len(sequence.block_table) >= pool.num_blocks_for(num_tokens), str(sequence)
    assert len(sequence.block_table) <= pool.num_blocks_for(len(sequence.token_ids)), str(sequence)
    assert sequence.block_table or sequence.phase is SequencePhase.WAITING, str(sequence)


def _check_progress(scheduler: DecodeScheduler, attempts: Mapping[AttemptId, Attempt]) -> None:
    """Sequences may stand still only for blocks that a reservation holds, which ends by itself."""
    is_idle = scheduler.step_id is None
    has_held = any(attempt.block_table for attempt in attempts.values())
    has_work = bool(scheduler.waiting or scheduler.running)
    assert not (is_idle and has_work and not has_held), "sequences wait for nothing"
