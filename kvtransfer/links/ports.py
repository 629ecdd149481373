"""Bounds a listening port that is not ours to accept on: torch's store and gloo keep every connection, for ever.

A filter of the kernel (Linux) drops what comes to a listening socket, so that it takes no newcomers; what it accepted
before goes on. Connections are found among this process's own descriptors, and hung up from outside.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python has no names for them
_MAX_FILTER_BYTES = 1024
_UNACKED_AT, _BYTES_RECEIVED_AT = 24, 128  # tcpi_unacked, tcpi_bytes_received in struct tcp_info
# struct sock_filter: code, where to go on when a comparison holds and when not, operand. What is seen begins with TCP's
# header; 0 bytes that are kept are a packet that is dropped.
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
_RETURN_HEADERS_ALONE = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x80, 0, 0, 0),  # A = the packet's length
        (0x07, 0, 0, 0),  # X = A
        (0x30, 0, 0, 12),  # A = the byte in whose upper half the header's length stands, in words of 4 bytes
        (0x54, 0, 0, 0xF0),
        (0x74, 0, 0, 2),
        (0x1D, 0, 1, 0),  # is it all that there is?
        (0x06, 0, 0, 0xFFFFFFFF),
        (0x06, 0, 0, 0),
    )
)

Address = tuple[str, int]


def close_to_newcomers(listener: socket.socket) -> None:
    """No new connection from now on; connections that stand are not touched. Where there are no filters, nothing."""
    _filter(listener, _RETURN_NOTHING)


def open_to_newcomers(listener: socket.socket) -> None:
    _unfilter(listener)


def silence(listener: socket.socket) -> bool:
    """Connections that come from now on may be made and ended, and say nothing until `let_speak`. False: no filters."""
    return _filter(listener, _RETURN_HEADERS_ALONE)


def let_speak(connection: socket.socket) -> None:
    _unfilter(connection)


def is_filtered(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _MAX_FILTER_BYTES))


def _filter(each: socket.socket, program: bytes) -> bool:
    held = ctypes.create_string_buffer(program, len(program))
    try:
        num_instructions = len(program) // len(_RETURN_NOTHING)
        prog = struct.pack("HL", num_instructions, ctypes.addressof(held))
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, prog)
    except OSError:
        return False
    return True


def _unfilter(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # there is none
        each.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


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


def num_not_accepted(listener: socket.socket) -> int:
    """Connections that stand and wait to be accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_AT + 4)
    return int.from_bytes(info[_UNACKED_AT:], sys.byteorder)


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


def origin_of(there: Address) -> Address | None:
    """Where this process's connection to that address comes from; None as long as there is none."""
    for duplicate in _own_sockets():
        with duplicate, contextlib.suppress(OSError):  # not connected, or no longer
            if duplicate.getpeername()[:2] == there:
                here: Address = duplicate.getsockname()[:2]
                return here
    return None


def _own_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            descriptor = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:  # closed meanwhile, and its number is a file's now
            os.close(descriptor)
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()
