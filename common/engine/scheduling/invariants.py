"""What must hold of a scheduler and its pool between any two events. Pure: no IO."""

from collections import Counter
from collections.abc import Sequence as Many

from common.engine.kv.block_pool import BlockPool, RefKind
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence, SequencePhase


def check_scheduler(scheduler: Scheduler, owned: Many[Sequence], held_tables: Many[tuple[int, ...]]) -> None:
    """`owned`: the sequences of live requests; `held_tables`: what requests and transfers hold.

    Every reference on a block has its owner, every sequence one place, and what can go on does.
    """
    pool = scheduler.blocks.pool
    pool.check_invariants()
    placed = (*scheduler.waiting, *scheduler.running)
    assert Counter(map(id, placed)) == Counter(map(id, owned)), "a sequence in two places, or in none"
    ended = tuple(sequence for sequence in scheduler.in_step if sequence.is_ended)
    _check_references(pool, RefKind.USED, [sequence.block_table for sequence in (*placed, *ended)])
    _check_references(pool, RefKind.HELD, held_tables)
    for sequence in (*placed, *ended):
        _check_sequence(sequence, scheduler)
    # Sequences may stand still only for blocks that are held, by what ends by itself.
    is_idle = scheduler.step_id is None
    assert not (is_idle and placed and not any(held_tables)), "sequences wait for nothing"


def _check_references(pool: BlockPool, kind: RefKind, tables: Many[tuple[int, ...]]) -> None:
    owned = Counter(block for table in tables for block in table)
    for block in range(pool.num_blocks):
        assert pool.num_refs(block, kind) == owned[block], f"block {block} is {kind.name} without an owner"


def _check_sequence(sequence: Sequence, scheduler: Scheduler) -> None:
    pool = scheduler.blocks.pool
    assert (sequence in scheduler.waiting) == (sequence.phase is SequencePhase.WAITING), str(sequence)
    assert (sequence in scheduler.running) == (sequence.phase is SequencePhase.RUNNING), str(sequence)
    assert (sequence in scheduler.in_step) == (sequence.num_scheduled > 0), str(sequence)
    assert 0 <= sequence.num_computed < len(sequence.token_ids), str(sequence)
    num_tokens = sequence.num_computed + sequence.num_scheduled
    assert len(sequence.block_table) >= pool.num_blocks_for(num_tokens), str(sequence)
    assert len(sequence.block_table) <= pool.num_blocks_for(len(sequence.token_ids)), str(sequence)
    assert sequence.block_table or sequence.phase is SequencePhase.WAITING, str(sequence)
