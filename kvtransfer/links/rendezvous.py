"""The store where the two ends of a link find each other: one TCPStore per decode worker.

Given a host, TCPStore still listens on every interface, so it gets a socket that is bound to the one address.
Anyone who reaches that address while a link is being made may read and write the store: it holds addresses only, under
prefixes with a random epoch, never a secret. TCPStore keeps every connection for ever, so the port takes newcomers only
while a link is being made; those that say nothing are hung up, and all that are left when none is made.
"""

import contextlib
import socket
import threading
from collections.abc import Iterable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kvtransfer.links.ports import Address, close_to_newcomers, connections, has_said_nothing, open_to_newcomers

BACKLOG = 128


class RendezvousStore:
    """Hosts the store. Owned by the decode worker's sessions.

    `is_bounded`: open only between `open` and `shut`; call `hang_up` every second or so. NCCL asks the store later too,
    at the first operation.
    """

    def __init__(self, host: str, timeout_s: float, *, is_bounded: bool = False) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(BACKLOG)
        self._listener = listener.dup()
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the store closes it
        )
        self._is_bounded = is_bounded
        self._lock = threading.Lock()  # guards _num_made and _silent
        self._num_made = 0  # links that are being made
        self._silent: frozenset[Address] = frozenset()
        own = connections(self.port)
        self._own_addresses = frozenset(own)  # of the store's client of itself
        _close_all(own.values())
        if is_bounded:
            close_to_newcomers(self._listener)

    @property
    def num_keys(self) -> int:
        return self._store.num_keys() if self._store is not None else 0

    def open(self) -> None:
        """Take newcomers until as many `shut` as `open`."""
        with self._lock:
            self._num_made += 1
            if self._is_bounded:
                open_to_newcomers(self._listener)

    def shut(self) -> None:
        """A link is made, or will not be: neither end asks any more."""
        with self._lock:
            self._num_made -= 1
            if self._is_bounded and not self._num_made:
                close_to_newcomers(self._listener)

    def hang_up(self) -> None:
        """End connections that have not said a word since the last call, and all while no link is being made.

        Looks at every descriptor of the process: not for the event loop.
        """
        if not self._is_bounded:
            return
        found = connections(self.port)
        with self._lock:
            others = {address: each for address, each in found.items() if address not in self._own_addresses}
            silent = {address for address, each in others.items() if has_said_nothing(each)}
            stale = self._silent & silent if self._num_made else others.keys()
            self._silent = frozenset(silent)
            for address in stale:
                with contextlib.suppress(OSError):  # it has ended already
                    found[address].shutdown(socket.SHUT_RDWR)
        _close_all(found.values())

    def forget(self, prefix: str) -> None:
        """Delete the keys of a link that has ended. Asks the store's own thread: not for the event loop."""
        if self._store is None:
            return
        for key in self._store.list_keys():
            if key.startswith(f"{prefix}/"):
                self._store.delete_key(key)

    def close(self) -> None:
        """Stop listening. Links that stand do not need the store any more."""
        self._store = None
        self._listener.close()


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def join_rendezvous(host: str, port: int, prefix: str, timeout_s: float) -> Store:
    """A client of its own for one link: a blocked look-up of one link must not hold up another's."""
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(prefix, client)
