"""A link through memory that two processes of one host share: one copy in, one copy out, no network.

A ring of pieces for each direction. What is in it is said on a UNIX socket of that direction, never in the memory: one
notice for each piece, and one byte back when the piece is free again. So waiting is a blocking read, the end of a peer
is the end of its socket, at once, and there is no head or tail in the memory that could be damaged: notices are checked
against what they may say, and the pieces hold nothing but data. As long as one end copies a piece in, the other copies
the one before it out.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.links.meeting import NUM_PIECES, PIECE_BYTES, RING_BYTES, Meeting
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.waiter import Pending

_NOTICE = struct.Struct("<QQ")  # bytes of the whole message, bytes of it in this piece
_FREE = b"\1"
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
Bytes = npt.NDArray[np.uint8]


def build_shm_link(meeting: Meeting, *, is_sender: bool, timeout_s: float, name: str) -> ProcessGroupLink:
    """An operation that sees no progress of the peer for `timeout_s` fails, and the link with it."""
    rings = _Rings(meeting, is_sender=is_sender, timeout_s=timeout_s)
    return ProcessGroupLink(rings, _post_send, _post_receive, name, _Rings.interrupt, _send_now)


class _Rings:
    """Both directions of one end. With its last reference memory and sockets are gone; no thread uses them then."""

    def __init__(self, meeting: Meeting, *, is_sender: bool, timeout_s: float) -> None:
        memory = np.frombuffer(meeting.memory, np.uint8)
        self._lanes = (meeting.from_sender, meeting.from_receiver)
        for lane in self._lanes:
            _set_timeout(lane, timeout_s)
        rings = (memory[:RING_BYTES], memory[RING_BYTES:])
        there, back = (0, 1) if is_sender else (1, 0)
        self.outgoing = _Outgoing(self._lanes[there], rings[there])
        self.incoming = _Incoming(self._lanes[back], rings[back])

    def interrupt(self) -> None:
        """End what waits, here and at the peer."""
        for lane in self._lanes:
            with contextlib.suppress(OSError):  # the peer has ended it
                lane.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        for lane in self._lanes:
            lane.close()


def _post_send(rings: _Rings, buffer: torch.Tensor) -> Pending:
    return _Copy(rings, rings.outgoing, buffer.numpy())


def _post_receive(rings: _Rings, buffer: torch.Tensor) -> Pending:
    return _Copy(rings, rings.incoming, buffer.numpy())


def _send_now(rings: _Rings, buffer: torch.Tensor) -> bool:
    with _ended_by_failure(rings):
        return rings.outgoing.carry_now(buffer.numpy())


class _Outgoing:
    """The direction that this end fills: by the caller's thread where there is room, else by the sending thread."""

    def __init__(self, lane: socket.socket, ring: Bytes) -> None:
        self._lane = lane
        self._pieces = ring.reshape(NUM_PIECES, PIECE_BYTES)
        self._num_free = NUM_PIECES
        self._at = 0

    def carry_now(self, message: Bytes) -> bool:
        """Whether all of it is in the ring: it is not begun where it would have to wait for room."""
        has_room = self._has_room(-(-len(message) // PIECE_BYTES))
        if has_room:
            self.carry(message)
        return has_room

    def carry(self, message: Bytes) -> None:
        """Returns when all of it is in the ring: the rest of its way needs nothing of this process."""
        for start in range(0, max(1, len(message)), PIECE_BYTES):
            part = message[start : start + PIECE_BYTES]
            if not self._num_free:
                self._count(self._lane.recv(NUM_PIECES))
            np.copyto(self._pieces[self._at, : len(part)], part)  # without the interpreter's lock
            self._at = (self._at + 1) % NUM_PIECES
            self._num_free -= 1
            self._lane.sendall(_NOTICE.pack(len(message), len(part)))

    def _has_room(self, num_pieces: int) -> bool:
        if self._num_free < num_pieces <= NUM_PIECES:
            with contextlib.suppress(BlockingIOError):
                self._count(self._lane.recv(NUM_PIECES, socket.MSG_DONTWAIT))
        return num_pieces <= self._num_free

    def _count(self, freed: bytes) -> None:
        if not freed:
            raise ConnectionError("the peer ended it")
        self._num_free += len(freed)
        if self._num_free > NUM_PIECES:
            raise ConnectionError("the peer freed more than there was")


class _Incoming:
    """The direction that the peer fills. Only this end's receiving thread calls it."""

    def __init__(self, lane: socket.socket, ring: Bytes) -> None:
        self._lane = lane
        self._pieces = ring.reshape(NUM_PIECES, PIECE_BYTES)
        self._at = 0

    def carry(self, room: Bytes) -> None:
        """Returns when one whole message is in `room`."""
        num_bytes, done = self._take(room, 0, None)
        while done < num_bytes:
            _, done = self._take(room, done, num_bytes)

    def _take(self, room: Bytes, done: int, expected: int | None) -> tuple[int, int]:
        """One piece; (bytes of the message, bytes of it that are in `room`)."""
        num_bytes, length = self._notice()
        if expected is not None and num_bytes != expected:
            raise ConnectionError(f"a message of {expected} bytes became one of {num_bytes}")
        if num_bytes > len(room):
            raise ConnectionError(f"a message of {num_bytes} bytes came where there was room for {len(room)}")
        if length != min(PIECE_BYTES, num_bytes - done):
            raise ConnectionError(f"a piece of {length} bytes at {done} of {num_bytes}")
        np.copyto(room[done : done + length], self._pieces[self._at, :length])
        self._at = (self._at + 1) % NUM_PIECES
        with contextlib.suppress(ConnectionError):  # a sender that has ended needs no room; what it sent is whole
            self._lane.sendall(_FREE)
        return num_bytes, done + length

    def _notice(self) -> tuple[int, int]:
        data = b""
        while len(data) < _NOTICE.size:
            more = self._lane.recv(_NOTICE.size - len(data))
            if not more:
                raise ConnectionError("the peer ended it")
            data += more
        num_bytes, length = _NOTICE.unpack(data)
        return num_bytes, length


class _Copy:
    """One operation; it is done in the thread that waits for it."""

    def __init__(self, rings: _Rings, way: _Outgoing | _Incoming, buffer: Bytes) -> None:
        self._rings = rings
        self._way = way
        self._buffer = buffer

    def wait(self) -> None:
        with _ended_by_failure(self._rings):
            self._way.carry(self._buffer)


@contextlib.contextmanager
def _ended_by_failure(rings: _Rings) -> Iterator[None]:
    """Raises RuntimeError, as torch's operations do; then both directions have ended."""
    try:
        yield
    except OSError as error:
        rings.interrupt()
        is_late = isinstance(error, BlockingIOError)  # the socket's time-out
        reason = "the peer made no progress within the time-out" if is_late else error.strerror or str(error)
        raise RuntimeError(reason) from error


def _set_timeout(lane: socket.socket, timeout_s: float) -> None:
    """The kernel's own, on a blocking socket: Python's would poll before each call."""
    lane.settimeout(None)
    value = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
