"""Packs chunks from the cache into staging buffers and back, encrypted. Joins `kv_packer` and `payload`."""

import torch

from common.values.ids import TransferId
from kvtransfer.chunk import payload
from kvtransfer.chunk.aead import Aead
from kvtransfer.chunk.kv_packer import KVPacker
from kvtransfer.chunk.payload import HEADER_BYTES
from kvtransfer.events import Chunk

# Stands behind a posted receive: overwritten means that the message was longer than announced.
_CANARY = bytes.fromhex("a55ac33c0ff0965a")


class ChunkCodec:
    """One end of one session's link. `pack` or `open` takes the link's chunks one after another, in its order."""

    def __init__(self, rows: KVPacker, aead: Aead) -> None:
        self._rows = rows
        self._aead = aead

    def pack(self, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Fill `buffer[:chunk.num_bytes]`. The blocks are not read after the return."""
        self._rows.gather(chunk, block_table, buffer[payload.data_range(chunk)])
        if buffer.is_cuda:
            header = bytearray(payload.Header.of(transfer_id, chunk, flags=0).encode())
            buffer[:HEADER_BYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
        else:
            payload.encrypt(_view(buffer[: chunk.num_bytes]), transfer_id, chunk, self._aead)

    def prepare(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Make a buffer ready to receive the chunk."""
        if not buffer.is_cuda:
            _view(buffer)[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] = _CANARY

    def open(self, transfer_id: TransferId, chunk: Chunk, buffer: torch.Tensor) -> str | None:
        """Check and decrypt what came into a prepared buffer. What is wrong with it, or None: it may be unpacked."""
        if buffer.is_cuda:
            return payload.header_problem(_view(buffer[:HEADER_BYTES].cpu()), transfer_id, chunk, flags=0)
        view = _view(buffer)
        problem = payload.decrypt(view[: chunk.num_bytes], transfer_id, chunk, self._aead)
        if view[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] != _CANARY:
            return f"chunk {chunk.seq}: expected {chunk.num_bytes} bytes, more came"
        return problem

    def unpack(self, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Scatter a chunk without problem into blocks. Safe beside `open`."""
        self._rows.scatter(chunk, block_table, buffer[payload.data_range(chunk)])


def _view(buffer: torch.Tensor) -> memoryview:
    return buffer.numpy().data
