"""The store where the two ends of a link find each other: one TCPStore per decode worker.

Given a host, TCPStore still listens on every interface, so it gets a socket that is bound to the one address.
Anyone who reaches that address while a link is being made may read and write the store: it holds addresses only, under
prefixes with a random epoch, never a secret, and gloo's links believe what is sealed alone (`sealed_store`). TCPStore
keeps every connection and every key for ever, so the port takes newcomers only while a link is being made; those that
say nothing, or more than a link takes, are hung up, and all that are left when none is made. Then a store that holds
more than the keys of links is replaced by an empty one.
"""

import socket
import threading
from collections.abc import Iterable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kvtransfer.links.ports import (
    Address,
    close_to_newcomers,
    connections,
    hang_up,
    num_bytes_received,
    open_to_newcomers,
)

BACKLOG = 128
# What one end of a link writes is some hundred bytes.
MAX_CONNECTION_BYTES = 1 << 20


class RendezvousStore:
    """Hosts the store. Owned by the decode worker's sessions.

    `is_bounded`: open only between `open` and `shut`; call `hang_up` several times a second. NCCL asks the store later
    too, at the first operation.
    """

    def __init__(self, host: str, timeout_s: float, *, is_bounded: bool = False) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(BACKLOG)
        self._listener = listener
        self._timeout = timedelta(seconds=timeout_s)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._is_bounded = is_bounded
        self._lock = threading.Lock()  # guards all that follows
        self._num_made = 0  # links that are being made
        self._silent: frozenset[Address] = frozenset()
        self._prefixes: set[str] = set()  # of links that are being made or stand
        self._own_addresses: frozenset[Address] = frozenset()  # of the store's client of itself
        self._store: TCPStore | None = self._new_store()
        if is_bounded:
            close_to_newcomers(self._listener)

    def _new_store(self) -> TCPStore:
        """Takes connections from the socket, as one before it did, and connects to itself."""
        before = connections(self.port)
        open_to_newcomers(self._listener)
        store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=self._listener.dup().detach(),  # the store closes it
        )
        after = connections(self.port)
        self._own_addresses = frozenset(after.keys() - before.keys())
        _close_all([*before.values(), *after.values()])
        return store

    @property
    def num_keys(self) -> int:
        return self._store.num_keys() if self._store is not None else 0

    def open(self, prefix: str) -> None:
        """A link of that prefix is about to be made. Take newcomers until as many `shut` as `open`."""
        with self._lock:
            self._num_made += 1
            self._prefixes.add(prefix)
            if self._is_bounded:
                open_to_newcomers(self._listener)

    def shut(self) -> None:
        """A link is made, or will not be: neither end asks any more."""
        with self._lock:
            self._num_made -= 1
            if self._is_bounded and not self._num_made:
                close_to_newcomers(self._listener)

    def hang_up(self) -> None:
        """End connections that have said nothing, or too much, and all while no link is being made; then clean up.

        Silence is judged at the second call that sees it. Looks at every descriptor of the process: not for the event
        loop.
        """
        if not self._is_bounded:
            return
        found = connections(self.port)
        with self._lock:
            others = {address: each for address, each in found.items() if address not in self._own_addresses}
            num_bytes = {address: num_bytes_received(each) for address, each in others.items()}
            silent = {address for address, num in num_bytes.items() if num == 0}
            stale = self._silent & silent | {
                address for address, num in num_bytes.items() if num > MAX_CONNECTION_BYTES
            }
            if not self._num_made:
                stale = frozenset(others)
            self._silent = frozenset(silent)
            for address in stale:
                hang_up(found[address])
            if not self._num_made and not others:
                self._clean()
        _close_all(found.values())

    def _clean(self) -> None:
        """While no link is being made and nobody is connected. Strangers may have stored what no command lists."""
        if self._store is not None and self._store.num_keys() > sum(map(self._is_of_a_link, self._store.list_keys())):
            self._store = None  # it ends here, before another takes its place
            self._store = self._new_store()
            close_to_newcomers(self._listener)

    def _is_of_a_link(self, key: str) -> bool:
        return any(key.startswith(f"{prefix}/") for prefix in self._prefixes)

    def forget(self, prefix: str) -> None:
        """Delete the keys of a link that has ended. Asks the store's own thread: not for the event loop."""
        with self._lock:
            self._prefixes.discard(prefix)
            store = self._store
        if store is None:
            return
        for key in store.list_keys():
            if key.startswith(f"{prefix}/"):
                store.delete_key(key)

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
