"""Packs chunks from the cache into staging buffers and back, with their header. Joins `cache_rows` and `payload`."""

import torch

from common.ids import TransferId
from kvtransfer import payload
from kvtransfer.cache_rows import CacheRows
from kvtransfer.digest import Digest
from kvtransfer.events import Chunk
from kvtransfer.plan import HEADER_BYTES

# Stands behind a posted receive: overwritten means that the message was longer than announced.
_CANARY = bytes.fromhex("a55ac33c0ff0965a")


class ChunkCodec:
    """One session's view of a cache: the digest is the session's. Thread-safe: it keeps no state."""

    def __init__(self, rows: CacheRows, digest: Digest) -> None:
        self._rows = rows
        self._digest = digest

    def pack(self, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Fill `buffer[:chunk.num_bytes]`. The blocks are not read after the return."""
        self._rows.gather(chunk, block_table, buffer[HEADER_BYTES : chunk.num_bytes])
        if buffer.is_cuda:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            payload.seal_header(_view(header), transfer_id, chunk)
            buffer[:HEADER_BYTES].copy_(header)
        else:
            payload.seal(_view(buffer[: chunk.num_bytes]), transfer_id, chunk, self._digest)

    def prepare(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Make a buffer ready to receive the chunk."""
        if not buffer.is_cuda:
            _view(buffer)[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] = _CANARY

    def problem(self, transfer_id: TransferId, chunk: Chunk, buffer: torch.Tensor) -> str | None:
        """What is wrong with what came into a prepared buffer, or None."""
        if buffer.is_cuda:
            return payload.header_problem(_view(buffer[:HEADER_BYTES].cpu()), transfer_id, chunk, Digest())
        view = _view(buffer)
        if view[chunk.num_bytes : chunk.num_bytes + len(_CANARY)] != _CANARY:
            return f"chunk {chunk.seq}: expected {chunk.num_bytes} bytes, more came"
        return payload.problem(view[: chunk.num_bytes], transfer_id, chunk, self._digest)

    def unpack(self, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Scatter a chunk without problem into blocks."""
        self._rows.scatter(chunk, block_table, buffer[HEADER_BYTES : chunk.num_bytes])


def _view(buffer: torch.Tensor) -> memoryview:
    return buffer.numpy().data
