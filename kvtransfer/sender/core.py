"""The prefill worker's side of the handoff: decides what is sent when, and when a transfer is over. Pure: no IO.

Owns every transfer from TransferStarted to TransferEnded, and per peer the window of announced-not-taken bytes.
Does not know how bytes move: the shell performs the effects.

A transfer (rows are `TRANSFER_ROWS`; what is not in them raises InvalidTransition):

    event                    absent   streaming        flushing         awaiting    ending
    TransferStarted          begin    -                -                -           -
    TokensComputed           -        cut and queue    -                -           ignore
    FirstTokensSampled       -        flush            -                -           ignore
    ChunkPacked              -        count            count            count       count, end at the last
    TransferCancelRequested  ignore   cancel           cancel           cancel      ignore
    AcknowledgedByPeer       ignore   drop peer        drop peer        end DONE    ignore
    CancelledByPeer          ignore   end CANCELLED    end CANCELLED    end CANC.   ignore
    (deadline)               -        cancel           cancel           cancel      -

    streaming: KV is being computed.  flushing: all computed; chunks are queued or the peer is not ready.
    awaiting: everything announced.   ending: the outcome is decided; a pack still reads the blocks.
    Transitions: flush -> flushing -> (last chunk announced) awaiting; cancel and end -> ending, or absent at once
    when no pack is in flight. TransferEnded is emitted on becoming absent, exactly once.

A peer (rows are `PEER_ROWS`):

    event       absent   connecting          ready                dropping
    PeerReady   -        ready, pump         -                    -
    ChunkSent   -        -                   free window, pump    free window
    PeerLost    ignore   end its transfers   end its transfers    end its transfers
    (stall)     -        drop                drop                 -

The stall: connecting, or chunks outstanding, and nothing taken for `link_timeout_s`. PeerLost ends transfers
LINK_LOST (or with the outcome that was decided before) whatever is unpacked: the shell posts it only after the
peer's pack thread has ended, so no emitted SendChunk reads a block any more and no later event of the peer comes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.cores.history import History
from common.values.ids import TransferId, WorkerRef
from kvtransfer.chunk.plan import ChunkCutter, ChunkPlanner
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelledByPeer,
    Chunk,
    ChunkPacked,
    ChunkSent,
    ConnectPeer,
    DropPeer,
    FirstTokensSampled,
    PeerLost,
    PeerReady,
    SendCancel,
    SendChunk,
    SenderEffect,
    SenderEvent,
    SendFinished,
    TokensComputed,
    TransferCancelRequested,
    TransferEnded,
    TransferOutcome,
    TransferStarted,
)
from kvtransfer.sender.state import Outstanding, SenderPeer, SenderPeerState, SenderTransfer, TransferState


class SenderCore:
    """`handle` and `handle_deadline` are the only mutators. `max_inflight_bytes` is per peer."""

    def __init__(self, planner: ChunkPlanner, max_inflight_bytes: int, link_timeout_s: float) -> None:
        self._planner = planner
        self._max_inflight_bytes = max_inflight_bytes
        self._link_timeout_s = link_timeout_s
        self._transfers: dict[TransferId, SenderTransfer] = {}
        self._peers: dict[WorkerRef, SenderPeer] = {}
        self._outstanding: dict[tuple[TransferId, int], Outstanding] = {}
        self._history = History()
        self._effects: list[SenderEffect] = []
        self._now_s = 0.0

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def handle(self, event: SenderEvent, now_s: float) -> Sequence[SenderEffect]:
        """Take one event in; the effects are to be performed in order."""
        self._now_s = now_s
        if isinstance(event, PeerReady | PeerLost | ChunkSent):
            self._handle_peer_event(event)
        else:
            self._handle_transfer_event(event)
        return self._take_effects()

    def handle_deadline(self, now_s: float) -> Sequence[SenderEffect]:
        """Cancel transfers past their deadline and drop peers that stalled."""
        self._now_s = now_s
        for transfer in list(self._transfers.values()):
            if transfer.state is not TransferState.ENDING and transfer.started.deadline_s <= now_s:
                self._history.note(transfer.transfer_id, f"deadline at {now_s}")
                self._cancel(transfer, "deadline exceeded")
        for ref, peer in self._peers.items():
            if peer.owes_progress and peer.last_progress_s + self._link_timeout_s <= now_s:
                self._drop_peer(ref, peer, f"no progress for {self._link_timeout_s} s")
        return self._take_effects()

    def next_deadline_s(self) -> float | None:
        """When `handle_deadline` has something to do, if nothing happens before."""
        transfers = (t.started.deadline_s for t in self._transfers.values() if t.state is not TransferState.ENDING)
        peers = (p.last_progress_s + self._link_timeout_s for p in self._peers.values() if p.owes_progress)
        return min((*transfers, *peers), default=None)

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        for transfer in self._transfers.values():
            self._check_transfer(transfer)
        for ref, peer in self._peers.items():
            self._check_peer(ref, peer)
        assert all(entry.peer in self._peers for entry in self._outstanding.values())
        assert not self._effects

    # ---- transfers ----------------------------------------------------------------------------------

    def _handle_transfer_event(self, event: Any) -> None:
        transfer = self._transfers.get(event.transfer_id)
        state = transfer.state if transfer else TransferState.ABSENT
        self._history.note(event.transfer_id, event)
        row = TRANSFER_ROWS.get((type(event), state))
        if row is None:
            raise self._history.invalid(event.transfer_id, f"{type(event).__name__} while {state}")
        row(self, transfer, event)

    def _begin(self, _: None, event: TransferStarted) -> None:
        cutter = ChunkCutter(self._planner, event.first_token, event.num_tokens)
        self._transfers[event.transfer_id] = SenderTransfer(event, cutter)
        peer = self._peers.get(event.peer)
        if peer is None:
            peer = self._peers[event.peer] = SenderPeer(self._now_s)
            self._effects.append(ConnectPeer(event.peer, event.address))
        peer.transfer_ids[event.transfer_id] = None

    def _compute(self, transfer: SenderTransfer, event: TokensComputed) -> None:
        try:
            chunks = transfer.cutter.advance(event.num_layers, event.token_end)
        except ValueError as error:
            raise self._history.invalid(event.transfer_id, str(error)) from None
        self._queue(transfer, chunks)

    def _flush(self, transfer: SenderTransfer, event: FirstTokensSampled) -> None:
        transfer.tokens = event.tokens
        transfer.state = TransferState.FLUSHING
        chunks = transfer.cutter.finish()
        if self._peer_of(transfer).state is SenderPeerState.READY:
            self._send_finished(transfer)
        self._queue(transfer, chunks)

    def _count_packed(self, transfer: SenderTransfer, event: ChunkPacked) -> None:
        entry = self._outstanding.get((event.transfer_id, event.seq))
        if entry is None or entry.is_packed:
            raise self._history.invalid(event.transfer_id, f"chunk {event.seq} packed but not being packed")
        entry.is_packed = True
        transfer.num_unpacked -= 1
        self._end_if_unread(transfer)

    def _cancel_requested(self, transfer: SenderTransfer, event: TransferCancelRequested) -> None:
        self._cancel(transfer, event.reason)

    def _acknowledged(self, transfer: SenderTransfer, _: AcknowledgedByPeer) -> None:
        self._decide(transfer, TransferOutcome.DONE, "")

    def _acknowledged_early(self, transfer: SenderTransfer, _: AcknowledgedByPeer) -> None:
        self._drop_peer(transfer.started.peer, self._peer_of(transfer), f"acknowledged {transfer.transfer_id} early")

    def _cancelled_by_peer(self, transfer: SenderTransfer, event: CancelledByPeer) -> None:
        self._decide(transfer, TransferOutcome.CANCELLED, event.reason)

    def _ignore(self, _: SenderTransfer | None, __: SenderEvent) -> None:
        """A legal event that comes late, twice, or too late to matter."""

    def _cancel(self, transfer: SenderTransfer, reason: str) -> None:
        peer = self._peer_of(transfer)
        if transfer.is_known_to_peer and peer.state is SenderPeerState.READY:
            self._effects.append(SendCancel(transfer.started.peer, transfer.transfer_id, reason))
        self._decide(transfer, TransferOutcome.CANCELLED, reason)

    def _decide(self, transfer: SenderTransfer, outcome: TransferOutcome, reason: str) -> None:
        """No more chunks; the transfer ends when no pack reads its blocks."""
        transfer.state, transfer.outcome, transfer.reason = TransferState.ENDING, outcome, reason
        peer = self._peer_of(transfer)
        if transfer.queue:
            transfer.queue.clear()
            peer.rotation.remove(transfer.transfer_id)
        self._end_if_unread(transfer)
        self._pump(peer)  # a smaller chunk of another transfer may fit now

    def _end_if_unread(self, transfer: SenderTransfer) -> None:
        if transfer.state is TransferState.ENDING and transfer.num_unpacked == 0:
            self._end(transfer)

    def _end(self, transfer: SenderTransfer) -> None:
        assert transfer.outcome is not None
        del self._transfers[transfer.transfer_id]
        self._peer_of(transfer).transfer_ids.pop(transfer.transfer_id)
        ended = TransferEnded(transfer.transfer_id, transfer.outcome, transfer.reason)
        self._history.note(transfer.transfer_id, ended)
        self._effects.append(ended)

    # ---- peers --------------------------------------------------------------------------------------

    def _handle_peer_event(self, event: PeerReady | PeerLost | ChunkSent) -> None:
        ref = self._taken_by(event) if isinstance(event, ChunkSent) else event.peer
        peer = self._peers.get(ref)
        state = peer.state if peer else SenderPeerState.ABSENT
        self._history.note(ref, event)
        row = PEER_ROWS.get((type(event), state))
        if row is None:
            raise self._history.invalid(ref, f"{type(event).__name__} while {state}")
        row(self, ref, peer, event)

    def _taken_by(self, event: ChunkSent) -> WorkerRef:
        entry = self._outstanding.get((event.transfer_id, event.seq))
        if entry is None or not entry.is_packed:
            self._history.note(event.transfer_id, event)
            raise self._history.invalid(event.transfer_id, f"chunk {event.seq} sent but not packed and outstanding")
        return entry.peer

    def _connected(self, _: WorkerRef, peer: SenderPeer, __: PeerReady) -> None:
        peer.state, peer.last_progress_s = SenderPeerState.READY, self._now_s
        for transfer_id in peer.transfer_ids:
            transfer = self._transfers[transfer_id]
            if transfer.state is TransferState.FLUSHING:
                self._send_finished(transfer)
        self._pump(peer)

    def _taken(self, _: WorkerRef, peer: SenderPeer, event: ChunkSent) -> None:
        entry = self._outstanding.pop((event.transfer_id, event.seq))
        peer.num_outstanding -= 1
        peer.inflight_bytes -= entry.num_bytes
        peer.last_progress_s = self._now_s
        self._pump(peer)

    def _lost(self, ref: WorkerRef, peer: SenderPeer, event: PeerLost) -> None:
        for transfer_id in list(peer.transfer_ids):
            transfer = self._transfers[transfer_id]
            if transfer.outcome is None:
                transfer.outcome, transfer.reason = TransferOutcome.LINK_LOST, event.reason
            self._end(transfer)
        del self._peers[ref]
        self._outstanding = {key: entry for key, entry in self._outstanding.items() if entry.peer != ref}

    def _lost_again(self, _: WorkerRef, __: None, ___: PeerLost) -> None:
        """A peer that is not known any more was lost: nothing depends on it."""

    def _drop_peer(self, ref: WorkerRef, peer: SenderPeer, reason: str) -> None:
        if peer.state is not SenderPeerState.DROPPING:
            peer.state = SenderPeerState.DROPPING
            self._effects.append(DropPeer(ref, reason))

    # ---- sending ------------------------------------------------------------------------------------

    def _queue(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        peer = self._peer_of(transfer)
        if chunks and not transfer.queue:
            peer.rotation.append(transfer.transfer_id)
        transfer.queue.extend(chunks)
        self._pump(peer)
        self._await_if_flushed(transfer, peer)

    def _pump(self, peer: SenderPeer) -> None:
        """Announce queued chunks while the window has room, one of each transfer in turn."""
        while peer.state is SenderPeerState.READY and peer.rotation:
            transfer = self._transfers[peer.rotation[0]]
            if not self._fits(peer, transfer.queue[0]):
                return
            peer.rotation.popleft()
            self._send_chunk(transfer, peer, transfer.queue.popleft())
            if transfer.queue:
                peer.rotation.append(transfer.transfer_id)
            self._await_if_flushed(transfer, peer)

    def _fits(self, peer: SenderPeer, chunk: Chunk) -> bool:
        """A chunk larger than the whole window goes alone."""
        return peer.inflight_bytes == 0 or peer.inflight_bytes + chunk.num_bytes <= self._max_inflight_bytes

    def _send_chunk(self, transfer: SenderTransfer, peer: SenderPeer, chunk: Chunk) -> None:
        started = transfer.started
        if peer.num_outstanding == 0:
            peer.last_progress_s = self._now_s
        self._outstanding[(started.transfer_id, chunk.seq)] = Outstanding(started.peer, chunk.num_bytes)
        peer.num_outstanding += 1
        peer.inflight_bytes += chunk.num_bytes
        transfer.num_unpacked += 1
        transfer.is_known_to_peer = True
        self._effects.append(SendChunk(started.peer, started.transfer_id, chunk, started.block_tables[chunk.group_idx]))

    def _send_finished(self, transfer: SenderTransfer) -> None:
        """Sent as soon as the prompt is computed, ahead of queued chunks: the receiver times the exposed part."""
        transfer.is_known_to_peer = True
        num_chunks = transfer.cutter.num_chunks
        self._effects.append(SendFinished(transfer.started.peer, transfer.transfer_id, num_chunks, transfer.tokens))

    def _await_if_flushed(self, transfer: SenderTransfer, peer: SenderPeer) -> None:
        if transfer.state is TransferState.FLUSHING and not transfer.queue and peer.state is SenderPeerState.READY:
            transfer.state = TransferState.AWAITING

    # ---- small things -------------------------------------------------------------------------------

    def _peer_of(self, transfer: SenderTransfer) -> SenderPeer:
        return self._peers[transfer.started.peer]

    def _take_effects(self) -> list[SenderEffect]:
        effects, self._effects = self._effects, []
        return effects

    def _check_transfer(self, transfer: SenderTransfer) -> None:
        peer = self._peer_of(transfer)
        unpacked = [key for key, entry in self._outstanding.items() if key[0] == transfer.transfer_id]
        assert transfer.num_unpacked == sum(not self._outstanding[key].is_packed for key in unpacked)
        assert transfer.transfer_id in peer.transfer_ids
        assert peer.rotation.count(transfer.transfer_id) == bool(transfer.queue)
        is_ending = transfer.state is TransferState.ENDING
        assert is_ending == (transfer.outcome is not None)
        assert not is_ending or transfer.num_unpacked > 0
        assert transfer.state is not TransferState.AWAITING or not transfer.queue

    def _check_peer(self, ref: WorkerRef, peer: SenderPeer) -> None:
        mine = [entry for entry in self._outstanding.values() if entry.peer == ref]
        assert peer.num_outstanding == len(mine)
        assert peer.inflight_bytes == sum(entry.num_bytes for entry in mine)
        assert peer.inflight_bytes <= self._max_inflight_bytes or len(mine) == 1
        assert all(transfer_id in self._transfers for transfer_id in peer.transfer_ids)
        assert peer.state is not SenderPeerState.CONNECTING or not mine
        is_idle = peer.state is SenderPeerState.READY and bool(peer.rotation)
        assert not is_idle or not self._fits(peer, self._transfers[peer.rotation[0]].queue[0])


_STREAMING, _FLUSHING = TransferState.STREAMING, TransferState.FLUSHING
_AWAITING, _ENDING, _ABSENT = TransferState.AWAITING, TransferState.ENDING, TransferState.ABSENT

# (event, state) -> what is done. Public: an explorer covers it row by row.
TRANSFER_ROWS: Mapping[tuple[type, TransferState], Callable[..., None]] = {
    (TransferStarted, _ABSENT): SenderCore._begin,
    (TokensComputed, _STREAMING): SenderCore._compute,
    (TokensComputed, _ENDING): SenderCore._ignore,
    (FirstTokensSampled, _STREAMING): SenderCore._flush,
    (FirstTokensSampled, _ENDING): SenderCore._ignore,
    **{(ChunkPacked, s): SenderCore._count_packed for s in (_STREAMING, _FLUSHING, _AWAITING, _ENDING)},
    **{(TransferCancelRequested, s): SenderCore._ignore for s in (_ABSENT, _ENDING)},
    **{(TransferCancelRequested, s): SenderCore._cancel_requested for s in (_STREAMING, _FLUSHING, _AWAITING)},
    **{(AcknowledgedByPeer, s): SenderCore._ignore for s in (_ABSENT, _ENDING)},
    **{(AcknowledgedByPeer, s): SenderCore._acknowledged_early for s in (_STREAMING, _FLUSHING)},
    (AcknowledgedByPeer, _AWAITING): SenderCore._acknowledged,
    **{(CancelledByPeer, s): SenderCore._ignore for s in (_ABSENT, _ENDING)},
    **{(CancelledByPeer, s): SenderCore._cancelled_by_peer for s in (_STREAMING, _FLUSHING, _AWAITING)},
}

PEER_ROWS: Mapping[tuple[type, SenderPeerState], Callable[..., None]] = {
    (PeerReady, SenderPeerState.CONNECTING): SenderCore._connected,
    (ChunkSent, SenderPeerState.READY): SenderCore._taken,
    (ChunkSent, SenderPeerState.DROPPING): SenderCore._taken,
    (PeerLost, SenderPeerState.ABSENT): SenderCore._lost_again,
    **{
        (PeerLost, s): SenderCore._lost
        for s in (SenderPeerState.CONNECTING, SenderPeerState.READY, SenderPeerState.DROPPING)
    },
}
