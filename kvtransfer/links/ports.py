"""Bounds a listening port that is not ours to accept on: torch's store and gloo keep every connection, for ever.

A filter of the kernel (Linux) drops what comes to a listening socket, so that it takes no newcomers; what it accepted
before goes on. Connections are found among this process's own descriptors, and hung up from outside.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python has no names for them
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # struct sock_filter: BPF_RET | BPF_K, 0 bytes are kept

Address = tuple[str, int]


def close_to_newcomers(listener: socket.socket) -> None:
    """No new connection from now on; connections that stand are not touched. Where there are no filters, nothing."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError:
        return


def open_to_newcomers(listener: socket.socket) -> None:
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except OSError:
        return


def listeners() -> dict[int, socket.socket]:
    """Duplicates of this process's listening TCP sockets, by port. Close them."""
    found: dict[int, socket.socket] = {}
    for duplicate in _own_sockets():
        try:
            is_listening = bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            port = duplicate.getsockname()[1] if is_listening else None
        except OSError:
            port = None
        if port is None or port in found:
            duplicate.close()
        else:
            found[port] = duplicate
    return found


def num_bytes_received(connection: socket.socket) -> int:
    """What has come in on it, read or not."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
    return int.from_bytes(info[_BYTES_RECEIVED_AT:], sys.byteorder)


def connections(port: int) -> dict[Address, socket.socket]:
    """Duplicates of this process's connections that came in on `port`, by the other end's address. Close them."""
    found: dict[Address, socket.socket] = {}
    for duplicate in _own_sockets():
        try:
            is_one = duplicate.getsockname()[1] == port
            address = duplicate.getpeername()[:2] if is_one else None
        except OSError:  # not connected, or no longer
            address = None
        if address is None or address in found:
            duplicate.close()
        else:
            found[address] = duplicate
    return found


def _own_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()
