"""Ports for servers that a test starts in processes of their own."""

import random
import socket
from contextlib import ExitStack

# Below those that the kernel gives when any is asked for (from 32768 on): while a server starts, no other gets its
# port. Above those that Ray's processes are given (to 19999).
_FIRST, _LAST = 20_000, 32_000
_given: set[int] = set()


def free_port(num_following: int = 0) -> int:
    """A port on loopback that is free, as are so many after it, and that was not given before."""
    while True:
        first = random.randint(_FIRST, _LAST)
        ports = set(range(first, first + num_following + 1))
        with ExitStack() as stack:
            try:
                for port in ports - _given:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        if not ports & _given:
            _given.update(ports)
            return first
