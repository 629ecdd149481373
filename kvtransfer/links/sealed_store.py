"""A rendezvous that anybody may write to, and in which each end of a link believes the other alone.

What is stored carries a MAC over where it stands, under a secret that the control stream carried: what a stranger
wrote, moved or kept from another link is refused.
"""

import hmac
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_MAC_BYTES = 32
_PURPOSE = b"pdserve rendezvous"  # the secret has another use: it encrypts chunks


class SealedStore(Store):
    """What gloo asks of a store, over another. torch calls it from threads of its own."""

    def __init__(self, store: Store, prefix: str, secret: bytes) -> None:
        """`prefix`: of the link; the MACs of another link differ."""
        super().__init__()
        self._store: Any = store  # its stub knows no bytes
        self._prefix = prefix.encode()
        self._key = hmac.digest(secret, _PURPOSE, "sha256")

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._mac(key, content) + content)

    def get(self, key: str) -> bytes:
        """Blocks until it is there. Raises RuntimeError when it is not the other end's, or does not come in time."""
        sealed = bytes(self._store.get(key))
        content = sealed[_MAC_BYTES:]
        if not hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(key, content)):
            raise RuntimeError("what stands in the rendezvous is not the peer's")
        return content

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _mac(self, key: str, content: bytes) -> bytes:
        """Names are told from contents by their lengths."""
        name = b"%d/%s/%d/%s" % (len(self._prefix), self._prefix, len(key.encode()), key.encode())
        return hmac.digest(self._key, name + content, "sha256")
