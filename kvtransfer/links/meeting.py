"""How both ends of a shared-memory link prove that they are on one host, and how they come to the same memory. Linux.

The receiver listens on a UNIX socket without a file (abstract namespace), which its hello names, with a token. Only a
process under the same kernel and in the same network namespace can connect to it: a container elsewhere cannot, and
no host name is believed. Each side then asks the kernel whose process the other is: another user's is refused, as a
file of mode 0600 would refuse it. The sender shows the token and passes the memory (memfd) and a second socket: no name
of either is ever in a file system, so a killed process leaves nothing behind.
"""

import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from kvtransfer.links.protocol import LinkClosed

PIECE_BYTES = 512 << 10
NUM_PIECES = 8
RING_BYTES = NUM_PIECES * PIECE_BYTES  # of one direction; a direction that is not used touches none of it
MEMORY_BYTES = 2 * RING_BYTES
TOKEN_BYTES = 16
_BACKLOG = 8
_STRANGER_TIMEOUT_S = 1.0
_UCRED = struct.Struct("3i")  # pid, uid, gid
# Without these the other end could cut the memory off, and a copy out of it would end this process (SIGBUS).
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def has_shared_memory() -> bool:
    """Whether this system has what the link is made of."""
    return all(hasattr(module, name) for module, name in ((os, "memfd_create"), (socket, "SO_PEERCRED")))


@dataclass(frozen=True, slots=True)
class Meeting:
    """What two ends have in common: the memory, and a socket for each direction."""

    memory: mmap.mmap
    from_sender: socket.socket
    from_receiver: socket.socket


class MeetingPoint:
    """The receiver's side. Close it."""

    def __init__(self) -> None:
        self.name = f"pdserve-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(_BACKLOG)

    def accept(self, timeout_s: float) -> Meeting:
        """The sender that has the token, past any stranger. Raises RuntimeError when it does not come in time."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0.0:
            self._listener.settimeout(left_s)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            if (meeting := _take(connection, self.token, min(left_s, _STRANGER_TIMEOUT_S))) is not None:
                return meeting
            connection.close()
        raise RuntimeError(f"the sender did not come for its memory within {timeout_s:g} s")

    def close(self) -> None:
        """Idempotent."""
        self._listener.close()


def meet(name: str, token: bytes, timeout_s: float) -> Meeting:
    """The sender's side, which makes the memory. Raises LinkClosed, with the reason, when the receiver is elsewhere."""
    if not has_shared_memory():
        raise LinkClosed("this system has no shared memory that processes can pass to each other")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_address(name))
        if (other := _uid_of(connection)) != os.geteuid():
            raise LinkClosed(f"the receiver is user {other}'s, this process user {os.geteuid()}'s")
        return _give(connection, token)
    except OSError as error:
        connection.close()
        raise LinkClosed(f"the receiver is not on this host, or in another container ({error.strerror})") from error
    except LinkClosed:
        connection.close()
        raise


def _give(connection: socket.socket, token: bytes) -> Meeting:
    descriptor = os.memfd_create("pdserve-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, MEMORY_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(descriptor, MEMORY_BYTES)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(connection, [token], [descriptor, theirs.fileno()])
        return Meeting(memory, connection, ours)
    finally:
        os.close(descriptor)


def _take(connection: socket.socket, token: bytes, timeout_s: float) -> Meeting | None:
    """None when it is not the sender. Whatever a stranger sends is looked at before it is used."""
    descriptors: list[int] = []
    try:
        if _uid_of(connection) != os.geteuid():
            return None
        connection.settimeout(timeout_s)
        shown, descriptors, _, _ = socket.recv_fds(connection, TOKEN_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if len(descriptors) != 2 or not hmac.compare_digest(shown, token):
            return None
        memory, other = descriptors
        if os.fstat(memory).st_size != MEMORY_BYTES or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        mapped = mmap.mmap(memory, MEMORY_BYTES)
        descriptors.remove(other)  # the socket owns it
        return Meeting(mapped, connection, socket.socket(fileno=other))
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _uid_of(connection: socket.socket) -> int:
    """As the kernel noted it when the other end connected or began to listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
