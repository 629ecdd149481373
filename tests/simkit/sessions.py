"""Simulated handoff sessions: two ordered control streams and a link between a prefill and a decode process.

The truths of the real transport: control messages keep their order and are never doubled; a send completes only when
its receive is posted; when a session dies each side hears it in its own time, what was under way is lost, and the
sender hears it only after its packs have ended.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from common.values.ids import TransferId, WorkerRef
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelAnnounced,
    CancelledByPeer,
    ChunkAnnounced,
    ChunkPacked,
    ChunkReceived,
    ChunkSent,
    ChunkWritten,
    ConnectPeer,
    DiscardChunk,
    DropPeer,
    FinishAnnounced,
    PeerLost,
    PeerReady,
    PostReceive,
    SendAcknowledged,
    SendCancel,
    SendChunk,
    SendFinished,
    WriteChunk,
)
from tests.simkit.layered_engine import Payload, read_chunk, write_chunk
from tests.simkit.nodes import SimWorker
from tests.simkit.virtual_time import VirtualTime


class Wire:
    """What a network does to a message: a delay; order is kept per direction by `Stream`."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self.time = time
        self.rng = rng
        self.slowness = 1.0

    def delay_s(self) -> float:
        return self.rng.choice((0.0002, 0.0005, 0.002, 0.01)) * self.slowness

    def copy_s(self) -> float:
        """How long a pack or a write takes: the thread that does it may wait for a processor."""
        return self.rng.choice((0.0002, 0.0005, 0.01))


class Stream:
    """One direction of an ordered connection. `close` loses what is under way."""

    def __init__(self, wire: Wire, deliver: Callable[[Any], None]) -> None:
        self._wire = wire
        self._deliver = deliver
        self._free_s = 0.0
        self._is_open = True

    def send(self, message: Any) -> None:
        self._free_s = max(self._free_s, self._wire.time.now_s + self._wire.delay_s())
        self._wire.time.after(self._free_s - self._wire.time.now_s, lambda: self._arrive(message))

    def mute(self, seconds: float) -> None:
        """What is sent from now on arrives only after a while."""
        self._free_s = max(self._free_s, self._wire.time.now_s + seconds)

    def close(self) -> None:
        self._is_open = False

    def _arrive(self, message: Any) -> None:
        if self._is_open:
            self._deliver(message)


class Session:
    """One life of a pair's session, from ConnectPeer until both sides have heard of its end."""

    def __init__(self, wire: Wire, sender: SimWorker, receiver: SimWorker) -> None:
        self.sender = sender
        self.receiver = receiver
        self.is_open = True
        self.receiver_knows = False
        self.corruptions = 0
        self._wire = wire
        self._up = Stream(wire, receiver.post)
        self._down = Stream(wire, sender.post)
        self._packing: deque[SendChunk] = deque()
        self._sent: deque[tuple[SendChunk, Payload]] = deque()
        self._posted: deque[PostReceive] = deque()
        self._is_moving = False

    @property
    def streams(self) -> tuple[Stream, Stream]:
        return self._up, self._down

    def open(self) -> None:
        self.receiver_knows = True
        self.receiver.post(PeerReady(self.sender.ref))
        self._down.send(PeerReady(self.receiver.ref))

    def break_(self, reason: str) -> None:
        """Both sides hear of it, each in its own time."""
        if not self.is_open:
            return
        self.is_open = False
        self._up.close()
        self._down.close()
        delays = [self._wire.rng.uniform(0.0, 0.1) for _ in range(2)]
        self._wire.time.after(delays[0], lambda: self.sender.post(PeerLost(self.receiver.ref, reason)))
        if self.receiver_knows:
            self._wire.time.after(delays[1], lambda: self.tell_receiver(reason))

    def tell_receiver(self, reason: str) -> None:
        if self.receiver_knows:
            self.receiver_knows = False
            self.receiver.post(PeerLost(self.sender.ref, reason))

    def perform_sender(self, effect: Any) -> None:
        """A network effect of the sender core."""
        ref = self.sender.ref
        match effect:
            case SendChunk(_, transfer_id, chunk):
                self._up.send(ChunkAnnounced(ref, transfer_id, chunk))
                self._packing.append(effect)
                self._wire.time.after(self._wire.copy_s(), self._pack)
            case SendFinished(_, transfer_id, num_chunks, tokens):
                self._up.send(FinishAnnounced(ref, transfer_id, num_chunks, tokens))
            case SendCancel(_, transfer_id, reason):
                self._up.send(CancelAnnounced(ref, transfer_id, reason))
            case DropPeer(_, reason):
                self.break_(reason)

    def perform_receiver(self, effect: Any) -> None:
        """A network effect of the receiver core."""
        match effect:
            case PostReceive():
                self._posted.append(effect)
                self._move()
            case SendAcknowledged(_, transfer_id):
                self._down.send(AcknowledgedByPeer(transfer_id))
            case SendCancel(_, transfer_id, reason):
                self._down.send(CancelledByPeer(transfer_id, reason))
            case DropPeer(_, reason):
                self.break_(reason)

    def _pack(self) -> None:
        if not self.is_open or not self._packing:
            return
        effect = self._packing.popleft()
        check_referenced(self.sender, effect)
        self._sent.append((effect, read_chunk(self.sender.engine, effect.chunk, effect.block_table)))
        self.sender.post(ChunkPacked(effect.transfer_id, effect.chunk.seq))
        self._move()

    def _move(self) -> None:
        if not self._is_moving and self.is_open and self._sent and self._posted:
            self._is_moving = True
            self._wire.time.after(self._wire.delay_s(), self._arrive)

    def _arrive(self) -> None:
        self._is_moving = False
        if not self.is_open or self.receiver.is_frozen or self.sender.is_frozen:
            # A frozen process moves no bytes; try again, for as long as the session stands.
            self._is_moving = self.is_open
            if self.is_open:
                self._wire.time.after(0.05, self._arrive)
            return
        (effect, payload), posted = self._sent.popleft(), self._posted.popleft()
        assert (effect.transfer_id, effect.chunk) == (posted.transfer_id, posted.chunk), "the link is out of step"
        error = None
        if self.corruptions:
            self.corruptions -= 1
            error, payload = "not what the peer encrypted", [[value + 1 for value in row] for row in payload]
        self.receiver_staging()[(self.sender.ref, effect.transfer_id, effect.chunk.seq)] = payload
        self.receiver.post(ChunkReceived(self.sender.ref, effect.transfer_id, effect.chunk.seq, error))
        self.sender.post(ChunkSent(effect.transfer_id, effect.chunk.seq))
        self._move()

    def receiver_staging(self) -> dict[tuple[WorkerRef, TransferId, int], Payload]:
        return staging_of(self.receiver)


def check_referenced(worker: SimWorker, effect: SendChunk | WriteChunk) -> None:
    """Blocks are read or written only while they are held."""
    size, chunk = worker.pool.block_size, effect.chunk
    for block in effect.block_table[chunk.token_start // size : -(-chunk.token_end // size)]:
        assert worker.pool.ref_count(block) > 0, f"{worker.ref}: block {block} is free while {effect} touches it"


def staging_of(worker: SimWorker) -> dict[tuple[WorkerRef, TransferId, int], Payload]:
    """The staging buffers of a decode process."""
    if not hasattr(worker, "staging"):
        worker.staging = {}  # type: ignore[attr-defined]
    staging: dict[tuple[WorkerRef, TransferId, int], Payload] = worker.staging  # type: ignore[attr-defined]
    return staging


class Sessions:
    """All sessions of a cluster, by (sender, receiver)."""

    def __init__(self, wire: Wire, find: Callable[[WorkerRef], SimWorker | None]) -> None:
        self._wire = wire
        self._find = find
        self._sessions: dict[tuple[WorkerRef, WorkerRef], Session] = {}
        self._writes: dict[WorkerRef, deque[tuple[WriteChunk, Payload]]] = {}

    def open_sessions(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.is_open]

    def perform(self, worker: SimWorker, effect: Any) -> None:
        """Any network effect of a worker's core."""
        match effect:
            case ConnectPeer(peer):
                self._wire.time.after(self._wire.delay_s(), lambda: self._connect(worker, peer))
            case WriteChunk() | DiscardChunk():
                self._settle(worker, effect)
            case SendChunk(peer) | SendFinished(peer) | SendCancel(peer) | DropPeer(peer) | PostReceive(peer):
                self._dispatch(worker, peer, effect)
            case SendAcknowledged(peer):
                self._dispatch(worker, peer, effect)

    def break_all_of(self, worker: SimWorker, reason: str) -> None:
        for session in self.open_sessions():
            if worker in (session.sender, session.receiver):
                session.break_(reason)

    def _connect(self, sender: SimWorker, peer: WorkerRef) -> None:
        receiver = self._find(peer)
        if not sender.is_alive:
            return
        if receiver is None or not receiver.is_alive or receiver.is_frozen:
            self._wire.time.after(0.05, lambda: sender.post(PeerLost(peer, "unreachable")))
            return
        old = self._sessions.get((sender.ref, peer))
        if old is not None:
            old.break_("replaced")
            old.tell_receiver("replaced")
        session = self._sessions[(sender.ref, peer)] = Session(self._wire, sender, receiver)
        session.open()

    def _dispatch(self, worker: SimWorker, peer: WorkerRef, effect: Any) -> None:
        if (session := self._sessions.get((worker.ref, peer))) is not None and session.is_open:
            session.perform_sender(effect)
        elif (session := self._sessions.get((peer, worker.ref))) is not None and session.is_open:
            session.perform_receiver(effect)
        elif isinstance(effect, DropPeer):
            # Dropped while connecting: the attempt to connect ends in a loss.
            self._wire.time.after(0.0, lambda: worker.post(PeerLost(peer, effect.reason)))

    def _settle(self, worker: SimWorker, effect: WriteChunk | DiscardChunk) -> None:
        staging = staging_of(worker)
        if isinstance(effect, DiscardChunk):
            del staging[(effect.peer, effect.transfer_id, effect.seq)]
            return
        payload = staging.pop((effect.peer, effect.transfer_id, effect.chunk.seq))
        self._writes.setdefault(worker.ref, deque()).append((effect, payload))
        self._wire.time.after(self._wire.copy_s(), lambda: self._write(worker))

    def _write(self, worker: SimWorker) -> None:
        """In the order in which they were asked for."""
        effect, payload = self._writes[worker.ref].popleft()
        if worker.is_alive:
            check_referenced(worker, effect)
            write_chunk(worker.engine, effect.chunk, effect.block_table, payload)
            worker.post(ChunkWritten(effect.transfer_id, effect.chunk.seq))
