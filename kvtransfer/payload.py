"""The bytes of a chunk: a fixed header, then K and V. Owns their layout and the copies between it and the cache.

    digest 16 | magic 4 | version 2 | flags 2 | transfer 8 | seq, layers, tokens 5 x 4 | data length 8 | 0 x 4
    data: [layers, 2 (K, V), tokens, kv_heads, head_dim], contiguous, in the cache's dtype

The digest is the session's, of everything after it; the flags say of which kind, zero when it is off.
The header does not steer anything: both sides know every field from the announcement, and it is compared.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass

from common.ids import TransferId
from kvtransfer.digest import DIGEST_BYTES, Digest
from kvtransfer.events import Chunk
from kvtransfer.plan import HEADER_BYTES

MAGIC = b"PDKV"
VERSION = 1
_FIELDS = struct.Struct("<4sHH8s5IQ4x")

assert DIGEST_BYTES + _FIELDS.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a chunk's header, without the digest."""

    magic: bytes
    version: int
    flags: int
    transfer: bytes
    seq: int
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    data_bytes: int

    @classmethod
    def of(cls, transfer_id: TransferId, chunk: Chunk, digest: Digest) -> "Header":
        """What the header of an announced chunk must be."""
        return cls(
            MAGIC,
            VERSION,
            digest.flag,
            hashlib.blake2b(str(transfer_id).encode(), digest_size=8).digest(),
            chunk.seq,
            chunk.layer_start,
            chunk.layer_end,
            chunk.token_start,
            chunk.token_end,
            chunk.num_bytes - HEADER_BYTES,
        )

    def encode(self) -> bytes:
        return _FIELDS.pack(*(getattr(self, name) for name in self.__slots__))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "Header":
        return cls(*_FIELDS.unpack(data))


def seal(payload: memoryview, transfer_id: TransferId, chunk: Chunk, digest: Digest) -> None:
    """Write the header in front of data that is in place. `payload` is the whole chunk."""
    if len(payload) != chunk.num_bytes:
        raise ValueError(f"{transfer_id} chunk {chunk.seq}: expected {chunk.num_bytes} bytes, packed {len(payload)}")
    payload[DIGEST_BYTES:HEADER_BYTES] = Header.of(transfer_id, chunk, digest).encode()
    payload[:DIGEST_BYTES] = digest.of(payload[DIGEST_BYTES:])


def seal_header(header: memoryview, transfer_id: TransferId, chunk: Chunk) -> None:
    """Fill the header alone, without a digest: for data that is on a device."""
    header[:DIGEST_BYTES] = bytes(DIGEST_BYTES)
    header[DIGEST_BYTES:] = Header.of(transfer_id, chunk, Digest()).encode()


def problem(payload: memoryview, transfer_id: TransferId, chunk: Chunk, digest: Digest) -> str | None:
    """What is wrong with a received chunk: a sentence with what was expected and what came, or None."""
    wrong = header_problem(payload[:HEADER_BYTES], transfer_id, chunk, digest)
    if wrong is not None:
        return wrong
    expected = digest.of(payload[DIGEST_BYTES:])
    if not hmac.compare_digest(payload[:DIGEST_BYTES], expected):
        return f"chunk {chunk.seq}: expected digest {expected.hex()}, got {payload[:DIGEST_BYTES].hex()}"
    return None


def header_problem(header: memoryview, transfer_id: TransferId, chunk: Chunk, digest: Digest) -> str | None:
    """What in a received header differs from the announcement, or None."""
    expected = Header.of(transfer_id, chunk, digest)
    got = Header.decode(header[DIGEST_BYTES:])
    if got == expected:
        return None
    fields = [name for name in Header.__slots__ if getattr(got, name) != getattr(expected, name)]
    differing = ", ".join(f"{name} {getattr(expected, name)!r}, got {getattr(got, name)!r}" for name in fields)
    return f"chunk {chunk.seq}: expected {differing}"
