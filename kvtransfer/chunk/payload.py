"""The bytes of a chunk: a fixed header, then K and V, then a tag. Owns their layout and how they are encrypted.

    header 48: magic 4 | version 2 | flags 2 | transfer 8 | seq, layers, tokens 5 x 4 | data length 8 | 0 x 4
    data:      [layers, 2 (K, V), tokens, kv_heads, head_dim], contiguous, in the cache's dtype
    tag 16:    the cipher's, over header and data; arbitrary where there is no encryption

Where the session is encrypted, as the flags say, the data are encrypted; the header never is. The header does not steer
anything: both sides know every field from the announcement, and it is compared.
"""

import hashlib
import struct
from dataclasses import dataclass

from common.values.ids import TransferId
from kvtransfer.chunk.aead import TAG_BYTES, Aead
from kvtransfer.chunk.plan import FRAME_BYTES
from kvtransfer.events import Chunk

MAGIC = b"PDKV"
VERSION = 2
_FIELDS = struct.Struct("<4sHH8s5IQ4x")
HEADER_BYTES = _FIELDS.size

assert HEADER_BYTES + TAG_BYTES == FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a chunk's header."""

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
    def of(cls, transfer_id: TransferId, chunk: Chunk, flags: int) -> "Header":
        """What the header of an announced chunk must be."""
        return cls(
            MAGIC,
            VERSION,
            flags,
            hashlib.blake2b(str(transfer_id).encode(), digest_size=8).digest(),
            chunk.seq,
            chunk.layer_start,
            chunk.layer_end,
            chunk.token_start,
            chunk.token_end,
            chunk.num_bytes - FRAME_BYTES,
        )

    def encode(self) -> bytes:
        return _FIELDS.pack(*(getattr(self, name) for name in self.__slots__))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "Header":
        return cls(*_FIELDS.unpack(data))


def data_range(chunk: Chunk) -> slice:
    """Where a chunk's K and V lie in its bytes."""
    return slice(HEADER_BYTES, chunk.num_bytes - TAG_BYTES)


def encrypt(payload: memoryview, transfer_id: TransferId, chunk: Chunk, aead: Aead) -> None:
    """Write the header in front of data that is in place, and encrypt the data. `payload` is the whole chunk."""
    if len(payload) != chunk.num_bytes:
        raise ValueError(f"{transfer_id} chunk {chunk.seq}: expected {chunk.num_bytes} bytes, packed {len(payload)}")
    payload[:HEADER_BYTES] = Header.of(transfer_id, chunk, aead.flag).encode()
    aead.encrypt(payload[:HEADER_BYTES], payload[HEADER_BYTES:])


def decrypt(payload: memoryview, transfer_id: TransferId, chunk: Chunk, aead: Aead) -> str | None:
    """Check a received chunk and decrypt it in place: a sentence with what is wrong, or None.

    The data of a chunk with a problem are arbitrary.
    """
    is_intact = aead.decrypt(payload[:HEADER_BYTES], payload[HEADER_BYTES:])
    wrong = header_problem(payload[:HEADER_BYTES], transfer_id, chunk, aead.flag)
    return wrong if wrong or is_intact else f"chunk {chunk.seq}: not what the peer encrypted for this place on the link"


def header_problem(header: memoryview, transfer_id: TransferId, chunk: Chunk, flags: int) -> str | None:
    """What in a received header differs from the announcement, or None."""
    expected = Header.of(transfer_id, chunk, flags)
    got = Header.decode(header)
    if got == expected:
        return None
    fields = [name for name in Header.__slots__ if getattr(got, name) != getattr(expected, name)]
    differing = ", ".join(f"{name} {getattr(expected, name)!r}, got {getattr(got, name)!r}" for name in fields)
    return f"chunk {chunk.seq}: expected {differing}"
