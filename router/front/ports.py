"""The public ports: bound before anything else starts, never shared with another process."""

import socket

_BACKLOG = 2048


class PortInUse(Exception):
    """Another process listens there. The message names the address and the flag to change it."""


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket; port 0 asks for a free one. Raises PortInUse. Never shares a port with another process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # For the remains of our own closed connections; on Linux it does not let two processes listen.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port with {flag}"
        ) from error
    return listener
