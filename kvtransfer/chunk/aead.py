"""How a chunk is protected on the link: AES-GCM under the session's key, which its control stream carried. Pure: no IO.

One mechanism for every session on CPU memory; what it promises depends on how the key travelled. Over mutual TLS the
link's bytes are secret, and none can be altered unseen between the two workers. Without TLS the key could be read, so
that only damage and mix-ups are seen. Memory on a device (NCCL) is neither encrypted nor checked: kind "none".

A nonce is the number of the message on its link, which both sides count and neither sends, so a message that is
repeated, left out or of another place is not decrypted. A key is drawn for each session, is used in one direction, and
dies with the link: no nonce comes twice under one.

Measured here, one thread, 384 KiB: 24 GB/s, without the interpreter's lock (Zen 5, 2026-11).
"""

import itertools
from enum import StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 16
TAG_BYTES = 16
_NONCE_BYTES = 12


class AeadKind(StrEnum):
    """As the receiver's hello names it."""

    NONE = "none"
    AES_GCM = "aes-gcm"


class Aead:
    """One end of one session's link: encrypts what is sent, or decrypts what comes, in the order of the link.

    Not thread-safe: only a sender's pack thread encrypts, only a link's receiving thread decrypts.
    """

    def __init__(self, kind: AeadKind, key: bytes) -> None:
        """Raises ValueError when the key has another length."""
        if kind is AeadKind.AES_GCM and len(key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
        self.kind = kind
        self._cipher = AESGCM(key) if kind is AeadKind.AES_GCM else None
        self._numbers = itertools.count()

    @property
    def flag(self) -> int:
        """In a chunk's header."""
        return int(self.kind is AeadKind.AES_GCM)

    def encrypt(self, header: memoryview, body: memoryview) -> None:
        """Encrypt `body` in place, its last TAG_BYTES excepted: the tag, over both, goes there."""
        if self._cipher is not None:
            # OpenSSL takes one and the same memory as input and output.
            self._cipher.encrypt_into(self._next_nonce(), body[:-TAG_BYTES], header, body)

    def decrypt(self, header: memoryview, body: memoryview) -> bool:
        """Decrypt `body` in place; False when header, body or their place on the link are not what was encrypted.

        After False the contents are arbitrary. Counts as a message either way.
        """
        if self._cipher is None:
            return True
        try:
            self._cipher.decrypt_into(self._next_nonce(), body, header, body[:-TAG_BYTES])
        except InvalidTag:
            return False
        return True

    def _next_nonce(self) -> bytes:
        return next(self._numbers).to_bytes(_NONCE_BYTES, "big")
