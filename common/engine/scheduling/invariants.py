"""What must hold of a scheduler and its pool between any two events. Pure: no IO."""

from collections import Counter
from collections.abc import Sequence as Many

from common.engine.kv.block_pool import BlockPool, RefKind
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import NO_BLOCK, BlockTableSet, Sequence, SequencePhase


def check_scheduler(scheduler: Scheduler, owned: Many[Sequence], held: Many[BlockTableSet]) -> None:
    """`owned`: the sequences of live requests; `held`: the tables of what requests hold for transfers.

    Every reference on a block has its owner, every sequence one place, and what can go on does.
    """
    groups = scheduler.blocks.groups
    for group in groups:
        group.pool.check_invariants()
    placed = (*scheduler.waiting, *scheduler.running, *scheduler.parked)
    assert Counter(map(id, placed)) == Counter(map(id, owned)), "a sequence in two places, or in none"
    ended = tuple(sequence for sequence in scheduler.in_step if sequence.is_ended)
    used = [sequence.block_tables for sequence in (*placed, *ended)]
    for idx, group in enumerate(groups):
        _check_references(group.pool, RefKind.USED, [tables[idx] for tables in used if tables])
        _check_references(group.pool, RefKind.HELD, [tables[idx] for tables in held if tables])
    for sequence in (*placed, *ended):
        _check_sequence(sequence, scheduler)
    # Sequences may stand still only for blocks that are held, by what ends by itself.
    is_idle = scheduler.step_id is None
    assert not (is_idle and placed and not any(held)), "sequences wait for nothing"


def _check_references(pool: BlockPool, kind: RefKind, tables: Many[tuple[int, ...]]) -> None:
    owned = Counter(block for table in tables for block in table if block != NO_BLOCK)
    for block in range(pool.num_blocks):
        assert pool.num_refs(block, kind) == owned[block], f"block {block} is {kind.name} without an owner"


def _check_sequence(sequence: Sequence, scheduler: Scheduler) -> None:
    assert (sequence in scheduler.waiting) == (sequence.phase is SequencePhase.WAITING), str(sequence)
    assert (sequence in scheduler.running) == (sequence.phase is SequencePhase.RUNNING), str(sequence)
    assert (sequence in scheduler.in_step) == (sequence.num_scheduled > 0), str(sequence)
    is_parked = sequence.phase is SequencePhase.PARKED
    assert (sequence in scheduler.parked) == is_parked, str(sequence)
    assert 0 <= sequence.num_computed < len(sequence.token_ids) + is_parked, str(sequence)
    assert not is_parked or not sequence.num_scheduled, str(sequence)
    assert sequence.num_scheduled or not sequence.draft_token_ids, str(sequence)
    assert sequence.block_tables or sequence.phase is not SequencePhase.RUNNING, str(sequence)
    for group, table in zip(scheduler.blocks.groups, sequence.block_tables, strict=False):
        _check_table(group, table, sequence)


def _check_table(group: PoolGroup, table: tuple[int, ...], sequence: Sequence) -> None:
    """Every token that the running or the next step reads or writes has its block."""
    num_blocks_for = group.pool.num_blocks_for
    num_tokens = sequence.num_computed + sequence.num_scheduled
    num_known = len(sequence.token_ids) + len(sequence.draft_token_ids)
    assert num_blocks_for(num_tokens) <= len(table) <= num_blocks_for(num_known), str(sequence)
    needed = table[group.first_block_needed(sequence.num_computed) : num_blocks_for(num_tokens)]
    assert NO_BLOCK not in needed, f"{sequence} lacks a block that it reads"
