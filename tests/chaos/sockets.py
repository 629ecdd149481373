"""Faults on live TCP connections of other processes, made by the kernel: no process has to be started in another way.

A descriptor of the other process is borrowed (`pidfd_getfd`), so that what is done to it happens to the very
connection, gloo's included. A filter that drops all makes a black hole below TCP: both sides see a silent peer and
retransmit until it is taken off. Linux only; allowed to root, and for descendants of the caller.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

_PIDFD_GETFD = 438  # the number on every architecture
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47
_IP_MINTTL = 21
_TCP_INFO_BYTES, _RETRANSMITS_AT = 104, 100
_DROP_ALL = (0x06, 0, 0, 0)  # BPF: return 0 bytes of every packet

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a connection, held by us as well. `close` gives our hold back; the connection stays."""

    pid: int
    local_port: int
    remote_port: int
    socket: socket.socket

    @property
    def num_retransmits(self) -> int:
        """Segments that this end sent again since it was opened."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("I", info, _RETRANSMITS_AT)[0])

    @property
    def pacing_rate(self) -> int:
        """Bytes per second that the kernel lets this end send."""
        return self.socket.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE)


def listening_ports(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def open_ports(pid: int) -> list[tuple[int, int, int]]:
    """(descriptor, local port, remote port) of every connection of a process that is up."""
    return [
        (connection.fd, connection.laddr.port, connection.raddr.port)
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    ]


def borrow(pid: int, fd: int, local_port: int, remote_port: int) -> Connection | None:
    """None when the descriptor is gone or another's by now."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        ours = _libc.syscall(_PIDFD_GETFD, handle, fd, 0)
    finally:
        os.close(handle)
    if ours < 0:
        return None
    borrowed = socket.socket(fileno=ours)
    try:
        is_same = (borrowed.getsockname()[1], borrowed.getpeername()[1]) == (local_port, remote_port)
    except OSError:
        is_same = False
    if not is_same:
        borrowed.close()
        return None
    return Connection(pid, local_port, remote_port, borrowed)


@contextlib.contextmanager
def connections_between(pid: int, peer: int, server_ports: set[int] | None = None) -> Iterator[list[Connection]]:
    """Both ends of every connection between two processes; only of those to or from `server_ports`, if stated."""
    ends = {(local, remote) for _, local, remote in open_ports(peer)}
    wanted = [
        (owner, fd, local, remote)
        for owner, ports in ((pid, open_ports(pid)), (peer, open_ports(peer)))
        for fd, local, remote in ports
        if (owner == peer or (remote, local) in ends)
        and (server_ports is None or local in server_ports or remote in server_ports)
    ]
    pairs = {(local, remote) for _, _, local, remote in wanted}
    borrowed = [borrow(*each) for each in wanted if (each[3], each[2]) in pairs]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(each.socket)) and each for each in borrowed if each is not None]
        yield held


@contextlib.contextmanager
def listeners(pid: int, ports: set[int]) -> Iterator[list[socket.socket]]:
    """The sockets of another process that listen on these ports. What is done to one is not done to connections."""
    with contextlib.ExitStack() as stack:
        handle = os.pidfd_open(pid)
        stack.callback(os.close, handle)
        found = []
        for each in psutil.Process(pid).net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port in ports:
                ours = _libc.syscall(_PIDFD_GETFD, handle, each.fd, 0)
                if ours >= 0:
                    found.append(stack.enter_context(socket.socket(fileno=ours)))
        yield found


@contextlib.contextmanager
def black_hole(ends: Sequence[Connection]) -> Iterator[None]:
    """Nothing that arrives at these ends is seen by TCP until the block is left."""
    with deaf([end.socket for end in ends]):
        yield


@contextlib.contextmanager
def deaf(held: Sequence[socket.socket]) -> Iterator[None]:
    """The same for sockets."""
    code = struct.pack("HBBI", *_DROP_ALL)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(buffer))
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for each in held:
            with contextlib.suppress(OSError):  # its owner gave up meanwhile
                each.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def unreachable(listening: Sequence[socket.socket]) -> Iterator[None]:
    """Listeners see no connection: every packet has come too far. Their owner may filter on its own."""
    for each in listening:
        each.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, 255)
    try:
        yield
    finally:
        for each in listening:
            each.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, 0)


@contextlib.contextmanager
def paced(ends: Sequence[Connection], bytes_per_s: int) -> Iterator[None]:
    """These ends send no faster until the block is left."""
    for end in ends:
        end.socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
    try:
        yield
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, -1)


def reset(ends: Sequence[Connection]) -> int:
    """Break connections with RST; returns how many were up."""
    num_reset = 0
    for end in ends:
        unspecified = struct.pack("H14x", socket.AF_UNSPEC)
        num_reset += _libc.connect(end.socket.fileno(), unspecified, len(unspecified)) == 0
    return num_reset


def is_possible() -> bool:
    """Whether this machine lets us borrow descriptors; some containers do not."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        end = borrow(os.getpid(), client.fileno(), client.getsockname()[1], client.getpeername()[1])
        if end is None:
            return False
        end.socket.close()
        return True
