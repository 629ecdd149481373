"""What must hold in every state of a `ClusterWorld`, and in those in which nothing but faults can happen."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from common.values.messages import Role
from tests.simkit.layered_engine import NUM_LAYERS
from tests.simkit.small_process import BLOCK_SIZE

if TYPE_CHECKING:
    from tests.simkit.cluster_world import ClusterWorld


def check(world: "ClusterWorld") -> None:
    """Every core's invariants; whatever reads or writes blocks does it in blocks that somebody still holds."""
    world.router.check_invariants()
    for name, process in world.processes.items():
        process.core.check_invariants()
        for what, table, tokens in _touched(world, name):
            for token in tokens:
                block = table[token // BLOCK_SIZE]
                assert process.pool.ref_count(block) > 0, f"{name}: block {block} is free while {what} touches it"


def _touched(world: "ClusterWorld", name: str) -> Iterable[tuple[str, tuple[int, ...], range]]:
    """(what, block table, tokens) of everything that is about to touch blocks of a process."""
    for pair, session in world.net.sessions.items():
        for pack in session.packing if pair.sender == name else []:
            yield f"a pack of {pack.transfer_id}", pack.block_table, range(pack.chunk.token_start, pack.chunk.token_end)
    for receiver, write in world.net.writing:
        if receiver == name:
            tokens = range(write.chunk.token_start, write.chunk.token_end)
            yield f"a write of {write.transfer_id}", write.block_table, tokens
    if (step := world.processes[name].step) is not None:
        for sequence in step[0].plan.sequences:
            yield "a step", sequence.block_tables[0], range(sequence.start + len(sequence.token_ids))


def check_quiet(world: "ClusterWorld") -> None:
    """The request was answered, in full unless its client left; every block is free again."""
    assert world.end, "the request was never answered"
    if world.budget.get("leave") != 0:
        answer = world.end, world.output, world.scores
        assert answer == ("Finished", world.expected, world.expected_scores)
    if world.budget.keys() <= {"redis"}:
        assert world.account == _account(world), f"the account depends on what came first: {world.account}"
    assert world.router.request_ids == ()
    assert not world.net.writing
    assert not world.net.staged, f"staging buffers leaked: {world.net.staged}"
    for name, process in world.processes.items():
        stats = process.pool.stats()
        assert (stats.used, stats.held) == (0, 0), f"{name} leaks: {stats}"
        assert process.core.next_deadline_s() is None, f"{name} still waits for something"


def _account(world: "ClusterWorld") -> tuple[object, ...]:
    """Cached tokens, prefilled tokens, chunks and bytes of KV, whatever overtook what.

    An answer of one token needs no KV, and books none.
    """
    from tests.simkit.cluster_world import PROMPT

    num_chunks = -(-len(PROMPT) // world.chunk_tokens) if len(world.expected) > 1 else 0
    num_rows = len(PROMPT) if num_chunks else 0
    return 0, len(PROMPT), num_chunks * NUM_LAYERS, num_rows * NUM_LAYERS


def identity_facts(world: "ClusterWorld") -> object:
    """Whether a write came by the link that a peer has now, and is of the expectation that stands now."""
    receivers: list[Any] = [p.core.role.transfers for p in world.processes.values() if p.role is Role.DECODE]
    return [
        (receiver._peers.get(write.peer.ref) is write.peer, receiver._attempts.get(key) is write.attempt)
        for receiver in receivers
        for write in receiver._writes.values()
        for key in [write.attempt.attempt_id]
    ]
