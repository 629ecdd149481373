"""The store where the two ends of a link find each other: one TCPStore per decode worker.

Given a host, TCPStore still listens on every interface, so it gets a socket that is bound to the one address.
Anyone who reaches that address may read and write the store: it holds addresses only, under prefixes with a
random epoch, never a secret.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

BACKLOG = 128


class RendezvousStore:
    """Hosts the store. Owned by the decode worker's sessions."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(BACKLOG)
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

    @property
    def num_keys(self) -> int:
        return self._store.num_keys() if self._store is not None else 0

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


def join_rendezvous(host: str, port: int, prefix: str, timeout_s: float) -> Store:
    """A client of its own for one link: a blocked look-up of one link must not hold up another's."""
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(prefix, client)
