"""The bytes of a chunk on the link: a fixed header, then its data, then a tag. Owns their layout.

    header 48: magic 4 | version 2 | flags 2 | transfer 8 | seq 4 | layers 2 x 2 | tokens 2 x 4 | data length 8
               | group 2 | shards 2 x 2 | 0 x 2
    data:      as `kvtransfer.chunk.pack` has them
    tag 16:    the cipher's, over header and data; arbitrary where there is no encryption

Where the session is encrypted, as the flags say, the data are encrypted; the header never is. The header does not steer
anything: both sides know every field from the announcement, and it is compared.
"""

import hashlib
import struct
from typing import NamedTuple

import torch

from common.values.ids import TransferId
from kvtransfer.chunk.aead import TAG_BYTES, Aead
from kvtransfer.chunk.pack import KVPacker
from kvtransfer.chunk.plan import FRAME_BYTES
from kvtransfer.events import Chunk

MAGIC = b"PDKV"
VERSION = 3
_FIELDS = struct.Struct("<4sHH8sIHHIIQHHH2x")
HEADER_BYTES = _FIELDS.size
# Stands behind a posted receive: overwritten means that the message was longer than announced.
_CANARY = bytes.fromhex("a55ac33c0ff0965a")

assert HEADER_BYTES + TAG_BYTES == FRAME_BYTES


class Header(NamedTuple):
    """The fields of a chunk's header. One is made for every chunk at each end, which a dataclass would be slow at."""

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
    group_idx: int
    shard_start: int
    shard_end: int

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
            chunk.group_idx,
            chunk.shard_start,
            chunk.shard_end,
        )

    def encode(self) -> bytes:
        return _FIELDS.pack(*self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "Header":
        return cls(*_FIELDS.unpack(data))


class ChunkCodec:
    """One end of one session's link. `pack` or `decrypt` takes the link's chunks one after another, in its order."""

    def __init__(self, packer: KVPacker, aead: Aead) -> None:
        self._packer = packer
        self._aead = aead

    def pack(self, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Fill `buffer[:chunk.num_bytes]`. The blocks are not read after the return."""
        self._packer.gather(chunk, block_table, buffer[data_range(chunk)])
        header = Header.of(transfer_id, chunk, self._aead.flag).encode()
        if buffer.is_cuda:
            with self._packer.beside_compute():
                buffer[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        else:
            view = _view(buffer)
            view[:HEADER_BYTES] = header
            self._aead.encrypt(view[:HEADER_BYTES], view[HEADER_BYTES : chunk.num_bytes])

    def prepare(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Make a buffer ready to receive the chunk."""
        if not buffer.is_cuda:
            _view(buffer)[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] = _CANARY

    def decrypt(self, transfer_id: TransferId, chunk: Chunk, buffer: torch.Tensor) -> str | None:
        """Check and decrypt in place what came into a prepared buffer: a sentence with what is wrong with it, or None.

        The data of a chunk with a problem are arbitrary; those of one without may be unpacked.
        """
        expected = Header.of(transfer_id, chunk, self._aead.flag)
        if buffer.is_cuda:
            with self._packer.beside_compute():
                header = buffer[:HEADER_BYTES].cpu()
            return _header_problem(Header.decode(_view(header)), expected)
        view = _view(buffer)
        is_intact = self._aead.decrypt(view[:HEADER_BYTES], view[HEADER_BYTES : chunk.num_bytes])
        if view[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] != _CANARY:
            return f"chunk {chunk.seq}: expected {chunk.num_bytes} bytes, more came"
        problem = _header_problem(Header.decode(view[:HEADER_BYTES]), expected)
        if problem is None and not is_intact:
            return f"chunk {chunk.seq}: not what the peer encrypted for this place on the link"
        return problem

    def unpack(self, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Scatter a chunk without problem into blocks. Safe beside `decrypt`."""
        self._packer.scatter(chunk, block_table, buffer[data_range(chunk)])


def data_range(chunk: Chunk) -> slice:
    """Where a chunk's data lie in its bytes."""
    return slice(HEADER_BYTES, chunk.num_bytes - TAG_BYTES)


def _header_problem(got: Header, expected: Header) -> str | None:
    """What in a received header differs from the announcement, or None."""
    if got == expected:
        return None
    fields = [name for name in Header._fields if getattr(got, name) != getattr(expected, name)]
    differing = ", ".join(f"{name} {getattr(expected, name)!r}, got {getattr(got, name)!r}" for name in fields)
    return f"chunk {expected.seq}: expected {differing}"


def _view(buffer: torch.Tensor) -> memoryview:
    return buffer.numpy().data
