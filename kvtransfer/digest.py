"""What a chunk's bytes are checked by: a session's digest. Pure: no IO.

    hmac-sha256  for sessions whose key travelled over TLS: nobody between the workers can alter a chunk unseen
    crc32        without TLS: the key could be read, so that only damage and mix-ups can be seen, and cheaper

Measured here, one thread, 384 KiB: crc32 7.1 GB/s, hmac.digest 1.3 to 2.0, sha1 1.5, blake2b 1.4 (Zen 4, 2026-11).
"""

import hmac
import zlib
from dataclasses import dataclass
from enum import StrEnum

DIGEST_BYTES = 16


class DigestKind(StrEnum):
    """As the receiver's hello names it."""

    NONE = ""
    CRC32 = "crc32"
    HMAC = "hmac-sha256"


_FLAGS = {DigestKind.NONE: 0, DigestKind.HMAC: 1, DigestKind.CRC32: 2}


@dataclass(frozen=True, slots=True)
class Digest:
    """One session's. The key keeps a chunk of another session from passing, by chance or on purpose."""

    kind: DigestKind = DigestKind.NONE
    key: bytes = b""

    @property
    def flag(self) -> int:
        """In a chunk's header."""
        return _FLAGS[self.kind]

    def of(self, data: memoryview) -> bytes:
        """DIGEST_BYTES of it; zeros when there is none."""
        match self.kind:
            case DigestKind.HMAC:
                return hmac.digest(self.key, data, "sha256")[:DIGEST_BYTES]
            case DigestKind.CRC32:
                return zlib.crc32(data, zlib.crc32(self.key)).to_bytes(DIGEST_BYTES, "little")
            case _:
                return bytes(DIGEST_BYTES)
