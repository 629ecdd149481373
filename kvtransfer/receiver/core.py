"""The decode worker's side of the handoff: decides what is received, what is kept, and when it is complete.

Pure: no IO. Owns every expectation from TransferExpected to TransferReceived or AttemptReleased, and per peer the
window of posted receives. Announced is committed: whatever a peer announced is received in order, and thrown away
when it is not wanted any more. Does not know how bytes move: the shell performs the effects.

What a peer says of a transfer (rows are `TRANSFER_ROWS`) depends on what the transfer is to us:

    event            unwanted             open                    current
    ChunkAnnounced   drain, refuse once   begin, drain or accept  accept, or fail on a mismatch
    ChunkReceived    discard              discard                 write, or discard and fail on an error
    FinishAnnounced  refuse once          begin, check            check, complete when all is written
    CancelAnnounced  ignore               ignore                  fail (the peer knows)

    unwanted: no expectation, withdrawn, an older try than one that began, failed, refused, or of another peer.
    open: expected, and a newer try than any that began: beginning it supersedes the current one.
    fail = SendCancel unless the peer knows, TransferFailedLocally; the expectation stands and the next try may come.
    refuse = SendCancel, once per transfer. complete = the announced chunks tile the expectation exactly, each is
    written, their number is what FinishAnnounced says: SendAcknowledged and TransferReceived.

What this worker says of an attempt (rows are `ATTEMPT_ROWS`; what is not in them raises InvalidTransition):

    event                 absent   expected                       withdrawn
    TransferExpected      expect   -                              -
    ExpectationWithdrawn  -        refuse the current, withdraw   ignore
    ChunkWritten          -        count, complete at the last    count, release at the last

    AttemptReleased follows a withdrawal at once when no WriteChunk is outstanding, else at the last ChunkWritten;
    completion waits for the writes of superseded transfers too, so afterwards nothing touches the blocks.

A peer (rows are `PEER_ROWS`); what a peer says while absent or dropping is ignored, except ChunkReceived:

    event      absent   ready                    dropping
    PeerReady  ready    -                        -
    PeerLost   ignore   fail its transfers       fail its transfers
    (breach)   -        drop                     -
    (stall)    -        drop                     -

    breach: a chunk whose bytes are not what its rectangle says, out of order, or far more than a window announced.
    stall: a posted receive, and nothing received for `link_timeout_s`. PeerLost fails transfers LINK_LOST; chunks
    received before are still being written: the shell keeps their staging buffers until ChunkWritten.
    After PeerLost no ChunkReceived of that link comes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.cores.history import History
from common.values.ids import AttemptId, TransferId, WorkerRef
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AttemptReleased,
    CancelAnnounced,
    Chunk,
    ChunkAnnounced,
    ChunkReceived,
    ChunkWritten,
    DiscardChunk,
    DropPeer,
    ExpectationWithdrawn,
    FinishAnnounced,
    PeerLost,
    PeerReady,
    PostReceive,
    ReceiverEffect,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    TransferExpected,
    TransferFailedLocally,
    TransferOutcome,
    WriteChunk,
)
from kvtransfer.receiver.coverage import Coverage
from kvtransfer.receiver.state import (
    Expectation,
    ExpectationState,
    ReceiverPeer,
    ReceiverPeerState,
    ReceiverTransfer,
    TransferStatus,
    Write,
)
from kvtransfer.receiver.window import ReceiveWindow


class ReceiverCore:
    """`handle` and `handle_deadline` are the only mutators. `max_inflight_bytes` is per peer."""

    def __init__(self, planner: ChunkPlanner, max_inflight_bytes: int, link_timeout_s: float) -> None:
        self._planner = planner
        self._max_inflight_bytes = max_inflight_bytes
        self._link_timeout_s = link_timeout_s
        self._attempts: dict[AttemptId, Expectation] = {}
        self._peers: dict[WorkerRef, ReceiverPeer] = {}
        self._writes: dict[tuple[TransferId, int], Write] = {}
        self._history = History()
        self._effects: list[ReceiverEffect] = []
        self._now_s = 0.0

    @property
    def num_attempts(self) -> int:
        """Attempts that are expected, or withdrawn and not released."""
        return len(self._attempts)

    def handle(self, event: ReceiverEvent, now_s: float) -> Sequence[ReceiverEffect]:
        """Take one event in; the effects are to be performed in order."""
        self._now_s = now_s
        match event:
            case PeerReady() | PeerLost():
                self._handle_peer_event(event)
            case TransferExpected() | ExpectationWithdrawn():
                self._handle_attempt_event(event.attempt_id, event)
            case ChunkWritten():
                self._handle_attempt_event(event.transfer_id.attempt_id, event)
            case ChunkReceived():
                self._handle_received(event)
            case ChunkAnnounced() | FinishAnnounced() | CancelAnnounced():
                self._handle_announcement(event)
        return self._take_effects()

    def handle_deadline(self, now_s: float) -> Sequence[ReceiverEffect]:
        """Drop peers that stalled."""
        self._now_s = now_s
        for peer in self._peers.values():
            if peer.owes_progress and peer.last_progress_s + self._link_timeout_s <= now_s:
                self._drop_peer(peer, f"nothing received for {self._link_timeout_s} s")
        return self._take_effects()

    def next_deadline_s(self) -> float | None:
        """When `handle_deadline` has something to do, if nothing happens before."""
        stalls = (p.last_progress_s + self._link_timeout_s for p in self._peers.values() if p.owes_progress)
        return min(stalls, default=None)

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        for attempt in self._attempts.values():
            attempt.check(self._writes.values())
            assert attempt.current is None or attempt.current.peer in self._peers
        for peer in self._peers.values():
            peer.check(self._writes.values())
        assert not self._effects

    # ---- attempts -----------------------------------------------------------------------------------

    def _handle_attempt_event(self, attempt_id: AttemptId, event: Any) -> None:
        attempt = self._attempts.get(attempt_id)
        state = attempt.state if attempt else ExpectationState.ABSENT
        self._history.note(attempt_id, event)
        if isinstance(event, ChunkWritten) and (event.transfer_id, event.seq) not in self._writes:
            raise self._history.invalid(attempt_id, f"chunk {event.seq} written but not being written")
        row = ATTEMPT_ROWS.get((type(event), state))
        if row is None:
            raise self._history.invalid(attempt_id, f"{type(event).__name__} while {state}")
        row(self, attempt, event)

    def _expect(self, _: None, event: TransferExpected) -> None:
        self._attempts[event.attempt_id] = Expectation(event)

    def _withdraw(self, attempt: Expectation, event: ExpectationWithdrawn) -> None:
        if (transfer := attempt.current) is not None:
            attempt.current = None
            self._refuse(transfer.peer, transfer.transfer_id, event.reason)
        attempt.state = ExpectationState.WITHDRAWN
        self._release_if_unwritten(attempt)

    def _written(self, attempt: Expectation, event: ChunkWritten) -> None:
        chunk = self._end_write(event)
        transfer = attempt.current
        if transfer is None:
            return
        if transfer.transfer_id == event.transfer_id:
            transfer.note_written(chunk, self._now_s)
        self._complete_if_all_written(attempt, transfer)

    def _written_after_withdrawal(self, attempt: Expectation, event: ChunkWritten) -> None:
        self._end_write(event)
        self._release_if_unwritten(attempt)

    def _end_write(self, event: ChunkWritten) -> Chunk:
        write = self._writes.pop((event.transfer_id, event.seq))
        write.attempt.num_writes -= 1
        write.peer.window.free(write.chunk.num_bytes)
        if self._peers.get(write.peer.ref) is write.peer:
            self._pump(write.peer)
        return write.chunk

    def _release_if_unwritten(self, attempt: Expectation) -> None:
        if attempt.num_writes == 0:
            del self._attempts[attempt.attempt_id]
            self._effects.append(AttemptReleased(attempt.attempt_id))

    # ---- what a peer says of a transfer ---------------------------------------------------------------

    def _handle_announcement(self, event: ChunkAnnounced | FinishAnnounced | CancelAnnounced) -> None:
        peer = self._peers.get(event.peer)
        if peer is None or peer.state is ReceiverPeerState.DROPPING:
            return
        self._history.note(event.transfer_id.attempt_id, event)
        if isinstance(event, ChunkAnnounced) and not self._commit(peer, event):
            return
        status = self._status_of(event.peer, event.transfer_id)
        TRANSFER_ROWS[(type(event), status)](self, self._attempts.get(event.transfer_id.attempt_id), event)
        self._pump(peer)

    def _handle_received(self, event: ChunkReceived) -> None:
        peer = self._peers.get(event.peer)
        self._history.note(event.transfer_id.attempt_id, event)
        chunk = peer.window.take_received(event.transfer_id, event.seq) if peer else None
        if peer is None or chunk is None:
            raise self._history.invalid(event.transfer_id.attempt_id, f"chunk {event.seq} received out of order")
        peer.last_progress_s = self._now_s
        status = self._status_of(event.peer, event.transfer_id)
        attempt = self._attempts.get(event.transfer_id.attempt_id)
        TRANSFER_ROWS[(ChunkReceived, status)](self, attempt, event, peer, chunk)
        self._pump(peer)

    def _status_of(self, peer: WorkerRef, transfer_id: TransferId) -> TransferStatus:
        attempt = self._attempts.get(transfer_id.attempt_id)
        if attempt is None or attempt.state is ExpectationState.WITHDRAWN:
            return TransferStatus.UNWANTED
        if (current := attempt.current) is not None and current.transfer_id == transfer_id:
            return TransferStatus.CURRENT if current.peer == peer else TransferStatus.UNWANTED
        is_new = transfer_id.prefill_try > attempt.newest_try and transfer_id not in self._peers[peer].refused
        return TransferStatus.OPEN if is_new else TransferStatus.UNWANTED

    def _commit(self, peer: ReceiverPeer, event: ChunkAnnounced) -> bool:
        """Take an announced chunk into the receive queue; a breach drops the peer: its next bytes are unknown."""
        problem = self._planner.problem(event.chunk) or peer.window.announce(event.transfer_id, event.chunk)
        if problem is not None:
            self._drop_peer(peer, f"{event.transfer_id}: {problem}")
        return problem is None

    def _drain(self, _: Expectation | None, event: ChunkAnnounced | FinishAnnounced) -> None:
        self._refuse(event.peer, event.transfer_id, "not wanted here")

    def _begin_with_chunk(self, attempt: Expectation, event: ChunkAnnounced) -> None:
        self._begin(attempt, event.peer, event.transfer_id)
        self._accept(attempt, event)

    def _begin_with_finish(self, attempt: Expectation, event: FinishAnnounced) -> None:
        self._begin(attempt, event.peer, event.transfer_id)
        self._finish(attempt, event)

    def _begin(self, attempt: Expectation, peer: WorkerRef, transfer_id: TransferId) -> None:
        if attempt.current is not None:
            self._fail(attempt, TransferOutcome.CANCELLED, f"superseded by try {transfer_id.prefill_try}")
        expected = attempt.expected
        coverage = Coverage(self._planner, expected.first_token, expected.num_tokens)
        attempt.newest_try = transfer_id.prefill_try
        attempt.current = ReceiverTransfer(transfer_id, peer, coverage)

    def _accept(self, attempt: Expectation, event: ChunkAnnounced) -> None:
        transfer = _current(attempt)
        problem = transfer.problem(event.chunk) or transfer.coverage.add(event.chunk)
        if problem is not None:
            self._fail(attempt, TransferOutcome.CANCELLED, problem)
            return
        if transfer.num_announced == 0:
            transfer.first_announced_s = self._now_s
        transfer.num_announced += 1
        transfer.num_bytes += event.chunk.num_bytes

    def _write(self, attempt: Expectation, event: ChunkReceived, peer: ReceiverPeer, chunk: Chunk) -> None:
        if event.error is not None:
            self._discard(attempt, event, peer, chunk)
            self._fail(attempt, TransferOutcome.CANCELLED, event.error)
            return
        self._writes[(event.transfer_id, event.seq)] = Write(attempt, peer, chunk)
        attempt.num_writes += 1
        block_table = attempt.expected.block_tables[chunk.group_idx]
        self._effects.append(WriteChunk(event.peer, event.transfer_id, chunk, block_table))

    def _discard(self, _: Expectation | None, event: ChunkReceived, peer: ReceiverPeer, chunk: Chunk) -> None:
        peer.window.free(chunk.num_bytes)
        self._effects.append(DiscardChunk(event.peer, event.transfer_id, event.seq))

    def _finish(self, attempt: Expectation, event: FinishAnnounced) -> None:
        transfer = _current(attempt)
        if transfer.finish is not None:
            return
        problem = transfer.finish_problem(event, attempt.expected.num_first_tokens)
        if problem is not None:
            self._fail(attempt, TransferOutcome.CANCELLED, problem)
            return
        transfer.finish, transfer.finished_s = event, self._now_s
        self._complete_if_all_written(attempt, transfer)

    def _cancelled_by_peer(self, attempt: Expectation, event: CancelAnnounced) -> None:
        self._peers[event.peer].refuse(event.transfer_id)
        self._fail(attempt, TransferOutcome.CANCELLED, event.reason)

    def _ignore(self, _: Expectation | None, __: ReceiverEvent) -> None:
        """A legal event that comes late, twice, or too late to matter."""

    def _complete_if_all_written(self, attempt: Expectation, transfer: ReceiverTransfer) -> None:
        if attempt.num_writes > 0 or transfer.finish is None or transfer.num_written < transfer.finish.num_chunks:
            return
        if not transfer.coverage.is_complete:
            self._fail(attempt, TransferOutcome.CANCELLED, f"{transfer.num_written} chunks do not cover the request")
            return
        del self._attempts[attempt.attempt_id]
        self._effects += [SendAcknowledged(transfer.peer, transfer.transfer_id), transfer.received(self._now_s)]

    def _fail(self, attempt: Expectation, outcome: TransferOutcome, reason: str) -> None:
        """End the current transfer; the expectation stands."""
        transfer = _current(attempt)
        attempt.current = None
        self._refuse(transfer.peer, transfer.transfer_id, reason)
        failed = TransferFailedLocally(transfer.transfer_id, outcome, reason)
        self._history.note(attempt.attempt_id, failed)
        self._effects.append(failed)

    def _refuse(self, ref: WorkerRef, transfer_id: TransferId, reason: str) -> None:
        peer = self._peers.get(ref)
        if peer is not None and peer.refuse(transfer_id) and peer.state is ReceiverPeerState.READY:
            self._effects.append(SendCancel(ref, transfer_id, reason))

    # ---- peers --------------------------------------------------------------------------------------

    def _handle_peer_event(self, event: PeerReady | PeerLost) -> None:
        peer = self._peers.get(event.peer)
        state = peer.state if peer else ReceiverPeerState.ABSENT
        self._history.note(event.peer, event)
        row = PEER_ROWS.get((type(event), state))
        if row is None:
            raise self._history.invalid(event.peer, f"{type(event).__name__} while {state}")
        row(self, event)

    def _connected(self, event: PeerReady) -> None:
        window = ReceiveWindow(self._max_inflight_bytes, event.link_bytes)
        self._peers[event.peer] = ReceiverPeer(event.peer, window, self._now_s)

    def _lost(self, event: PeerLost) -> None:
        del self._peers[event.peer]
        for attempt in self._attempts.values():
            if attempt.current is not None and attempt.current.peer == event.peer:
                self._fail(attempt, TransferOutcome.LINK_LOST, event.reason)

    def _lost_again(self, _: PeerLost) -> None:
        """A peer that is not known any more was lost: nothing depends on it."""

    def _drop_peer(self, peer: ReceiverPeer, reason: str) -> None:
        peer.state = ReceiverPeerState.DROPPING
        self._effects.append(DropPeer(peer.ref, reason))

    def _pump(self, peer: ReceiverPeer) -> None:
        """Post receives in announced order while the window has room."""
        while peer.state is ReceiverPeerState.READY and peer.window.can_post:
            if peer.window.num_posted == 0:
                peer.last_progress_s = self._now_s
            self._effects.append(PostReceive(peer.ref, *peer.window.post_next()))

    # ---- small things -------------------------------------------------------------------------------

    def _take_effects(self) -> list[ReceiverEffect]:
        effects, self._effects = self._effects, []
        return effects


def _current(attempt: Expectation) -> ReceiverTransfer:
    assert attempt.current is not None
    return attempt.current


_UNWANTED, _OPEN, _CURRENT = TransferStatus.UNWANTED, TransferStatus.OPEN, TransferStatus.CURRENT

# (event, state) -> what is done. Public: an explorer covers them row by row.
TRANSFER_ROWS: Mapping[tuple[type, TransferStatus], Callable[..., None]] = {
    (ChunkAnnounced, _UNWANTED): ReceiverCore._drain,
    (ChunkAnnounced, _OPEN): ReceiverCore._begin_with_chunk,
    (ChunkAnnounced, _CURRENT): ReceiverCore._accept,
    (ChunkReceived, _UNWANTED): ReceiverCore._discard,
    (ChunkReceived, _OPEN): ReceiverCore._discard,
    (ChunkReceived, _CURRENT): ReceiverCore._write,
    (FinishAnnounced, _UNWANTED): ReceiverCore._drain,
    (FinishAnnounced, _OPEN): ReceiverCore._begin_with_finish,
    (FinishAnnounced, _CURRENT): ReceiverCore._finish,
    (CancelAnnounced, _UNWANTED): ReceiverCore._ignore,
    (CancelAnnounced, _OPEN): ReceiverCore._ignore,
    (CancelAnnounced, _CURRENT): ReceiverCore._cancelled_by_peer,
}

ATTEMPT_ROWS: Mapping[tuple[type, ExpectationState], Callable[..., None]] = {
    (TransferExpected, ExpectationState.ABSENT): ReceiverCore._expect,
    (ExpectationWithdrawn, ExpectationState.EXPECTED): ReceiverCore._withdraw,
    (ExpectationWithdrawn, ExpectationState.WITHDRAWN): ReceiverCore._ignore,
    (ChunkWritten, ExpectationState.EXPECTED): ReceiverCore._written,
    (ChunkWritten, ExpectationState.WITHDRAWN): ReceiverCore._written_after_withdrawal,
}

PEER_ROWS: Mapping[tuple[type, ReceiverPeerState], Callable[..., None]] = {
    (PeerReady, ReceiverPeerState.ABSENT): ReceiverCore._connected,
    (PeerLost, ReceiverPeerState.ABSENT): ReceiverCore._lost_again,
    (PeerLost, ReceiverPeerState.READY): ReceiverCore._lost,
    (PeerLost, ReceiverPeerState.DROPPING): ReceiverCore._lost,
}
