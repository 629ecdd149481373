"""Nobody but the peer says a byte to gloo while a link is being made.

gloo believes whoever connects, and a header that it does not like ends the process. So the kernel drops what comes on
each connection to its port, until the peer has said in the rendezvous, under the session's secret, which one is its
own: that one is opened, and what it had sent comes again by itself (TCP). Linux; elsewhere everybody is let in.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from common.telemetry.logs import get_logger
from kvtransfer.links.ports import (
    Address,
    connections,
    hang_up,
    is_filtered,
    let_speak,
    num_not_accepted,
    origin_of,
    silence,
)

_ORIGIN = "origin"  # the address that the end comes from which connects; which one it is, gloo decides
_FIRST_LOOK_S, _LONGEST_WAIT_S, _SLOWER = 0.005, 0.25, 1.5
_MAX_LOOKS = 100


class Gate:
    """Stands before one listening socket, which the caller owns."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._address: Address = listener.getsockname()[:2]
        self._is_shut = silence(listener)
        if not self._is_shut:
            get_logger().warning("link_gate_open", port=self._address[1])
        self._is_over = threading.Event()
        self._is_done = False
        self._problem = ""

    def was_passed(self) -> bool:
        """Whether somebody came between the listener's first moment and the gate's: gloo hears him."""
        for _ in range(_MAX_LOOKS):
            if not self._is_shut or not num_not_accepted(self._listener):
                break
            time.sleep(_FIRST_LOOK_S)
        found = connections(self._address[1])
        are_filtered = [is_filtered(each) for each in found.values()]
        for each in found.values():
            each.close()
        return self._is_shut and not all(are_filtered)

    @contextmanager
    def letting_in(self, notes: Store, end: int, timeout_s: float) -> Iterator[None]:
        """While the link is built in this thread. `notes`: what only the two ends can write, for this use alone.

        Raises RuntimeError, with the reason, when the peer could not be let in within the time.
        """
        if not self._is_shut:
            yield
            return
        thread = threading.Thread(target=self._run, args=(notes, end), name="link-gate", daemon=True)
        thread.start()
        try:
            yield
            thread.join(timeout_s)  # the end that connects is done before the other one knows it
        except RuntimeError as error:
            raise RuntimeError(self._problem or str(error)) from error
        finally:
            self._is_over.set()
            thread.join(timeout_s)  # a look into the rendezvous of a peer that stands still takes any time
        if not self._is_done:
            raise RuntimeError(self._problem or f"the peer was not let in within {timeout_s:g} s")

    def _run(self, notes: Store, end: int) -> None:
        try:
            notes.set(f"listens/{end}", _written(self._address))
            self._is_done = self._introduce(notes, f"listens/{1 - end}")
        except (RuntimeError, ValueError, OSError) as error:
            self._problem = str(error).partition("\n")[0]

    def _introduce(self, notes: Store, other_key: str) -> bool:
        """Until this end has said where it comes from, or has let in who comes from where the other end said."""
        there = origin = None
        for _ in self._looks():
            if there is None and notes.check([other_key]):
                there = _read(notes.get(other_key))
            if there is not None and (here := origin_of(there)) is not None:
                notes.set(_ORIGIN, _written(here))
                return True
            if origin is None and notes.check([_ORIGIN]):
                origin = _read(notes.get(_ORIGIN))
            if not self._is_over.is_set() and self._let_in(origin):  # after it the port may be another link's
                return True
        return False

    def _let_in(self, origin: Address | None) -> bool:
        """Whether the peer is there, and may speak. Who came before the gate was shut goes: it has had its say."""
        found = connections(self._address[1])
        try:
            for address, connection in found.items():
                if not is_filtered(connection) and address != origin:
                    hang_up(connection)
            if origin is None or origin not in found:
                return False
            let_speak(found[origin])
            return True
        finally:
            for connection in found.values():
                connection.close()

    def _looks(self) -> Iterator[None]:
        """Often at first: what the peer sends at once is sent again after 0.2 s, and then more and more rarely."""
        wait_s = _FIRST_LOOK_S
        while not self._is_over.wait(wait_s):
            yield
            wait_s = min(wait_s * _SLOWER, _LONGEST_WAIT_S)


def _written(address: Address) -> str:
    return f"{address[1]} {address[0]}"


def _read(text: bytes) -> Address:
    """Raises ValueError unless it is what `_written` writes."""
    port, _, host = text.decode().partition(" ")
    return host, int(port)
