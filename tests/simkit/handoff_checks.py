"""What must hold in every state of a `HandoffWorld`, and in those in which nothing but faults can happen."""

from typing import TYPE_CHECKING

from kvtransfer.events import TransferOutcome

if TYPE_CHECKING:
    from tests.simkit.handoff_world import HandoffWorld


def check(world: "HandoffWorld") -> None:
    """The cores' own invariants, and each transfer is alive until it was reported as ended, and not after."""
    for sender in world.senders.values():
        sender.check_invariants()
    for receiver in world.receivers.values():
        receiver.check_invariants()
    live = {entry.transfer_id for sender in world.senders.values() for entry in sender._transfers.values()}
    assert live == {entry.transfer_id for entry in world.tries if entry.outcome is None}


def identity_facts(world: "HandoffWorld") -> object:
    """Whether a write came by the link that a peer has now, and is of the expectation that stands now."""
    return [
        (receiver._peers.get(write.peer.ref) is write.peer, receiver._attempts.get(attempt_id) is write.attempt)
        for receiver in world.receivers.values()
        for write in receiver._writes.values()
        for attempt_id in [write.attempt.attempt_id]
    ]


def check_quiet(world: "HandoffWorld") -> None:
    """Nothing is left anywhere, whatever happened; what was acknowledged was received."""
    assert all(entry.outcome is not None for entry in world.tries), "a transfer never ended"
    assert not any(session.packing for session in world.net.sessions.values())
    if world.net.frozen is not None:
        return
    assert not world.net.staged, f"staging buffers leaked: {world.net.staged}"
    assert not world.net.writing
    for attempt_id, grant in world.grants.items():
        outcomes = [entry.outcome for entry in world.tries if entry.transfer_id.attempt_id == attempt_id]
        if TransferOutcome.DONE in outcomes and not world.faults.has_peer_lied:
            assert grant.end in ("received", "crashed"), f"{attempt_id}: acknowledged and not received"
        if grant.end is None:
            assert len(outcomes) == world.num_tries, f"{attempt_id} waits for nothing"
