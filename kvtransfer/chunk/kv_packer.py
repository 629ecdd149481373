"""Copies between a paged KV cache and the contiguous data of a chunk. Owns no memory and no thread.

On the CPU the copies are numpy's: they release the GIL and use this thread alone. torch's index_select and
index_copy_ wake torch's own pool and fight the forward pass for it: measured here beside a second torch thread,
0.1 to 0.5 GB/s, where numpy copies 35 to 45 GB/s.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.engine.kv.fence import Fence
from kvtransfer.events import Chunk

# Copies the rows of some slots [num_tokens] int64 in some layers between a cache and a payload
# [num_layers, 2, num_tokens, *row], as `pack_chunk` and `unpack_chunk` of `common.engine.devices.triton.chunk` do.
CopyChunk = Callable[[torch.Tensor, torch.Tensor, range, torch.Tensor], None]


class KVPacker(Protocol):
    """Row = K or V of one token in one layer. `block_table[i]` holds tokens [i * block_size, (i + 1) * block_size)."""

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        """Copy the chunk's rows into `out`: uint8, 1-D, the chunk's data bytes, in CPU memory."""
        ...

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        """Inverse of `gather`."""
        ...


def kv_packer(kv: torch.Tensor, fence: Fence | None = None) -> KVPacker:
    """Access to `kv` [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], which must stay alive.

    `fence` is what keeps copies behind the kernels that compute `kv`; None where nothing runs ahead.
    """
    if kv.dim() != 6 or not kv.is_contiguous():
        raise ValueError(f"expected a contiguous 6-D KV cache, got {tuple(kv.shape)}, strides {kv.stride()}")
    if not kv.is_cuda:
        return NumpyKVPacker(kv)
    from common.engine.devices.triton.chunk import pack_chunk, unpack_chunk  # imports triton, which a CPU does without

    return TorchKVPacker(kv, pack_chunk, unpack_chunk, fence)


def bytes_per_token_layer(kv: torch.Tensor) -> int:
    """K and V of one token in one layer."""
    return 2 * kv.shape[4] * kv.shape[5] * kv.element_size()


class NumpyKVPacker:
    """A cache in CPU memory."""

    def __init__(self, kv: torch.Tensor) -> None:
        num_layers, _, num_blocks, self._block_size, num_kv_heads, head_dim = kv.shape
        row_bytes = num_kv_heads * head_dim * kv.element_size()
        # Wide items copy faster than single bytes; the dtype of the cache does not matter to a copy.
        self._item = np.dtype(np.int64 if row_bytes % 8 == 0 else np.uint8)
        as_bytes = kv.view(torch.uint8).numpy().reshape(num_layers, 2, num_blocks * self._block_size, row_bytes)
        self._rows = as_bytes.view(self._item)  # [num_layers, 2, num_slots, row_items]

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        slots = _slots(chunk, block_table, self._block_size, self._rows.shape[2])
        target = self._rectangle(chunk, out)
        for layer_idx in range(chunk.layer_end - chunk.layer_start):
            for k_or_v in range(2):
                rows = self._rows[chunk.layer_start + layer_idx, k_or_v]
                # mode="clip" writes straight into `out`; "raise" would buffer. _slots has checked the range.
                np.take(rows, slots, axis=0, out=target[layer_idx, k_or_v], mode="clip")

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        slots = _slots(chunk, block_table, self._block_size, self._rows.shape[2])
        source = self._rectangle(chunk, data)
        for layer_idx in range(chunk.layer_end - chunk.layer_start):
            for k_or_v in range(2):
                self._rows[chunk.layer_start + layer_idx, k_or_v][slots] = source[layer_idx, k_or_v]

    def _rectangle(self, chunk: Chunk, data: torch.Tensor) -> npt.NDArray[np.generic]:
        num_layers, num_tokens = chunk.layer_end - chunk.layer_start, chunk.token_end - chunk.token_start
        items: npt.NDArray[np.generic] = data.numpy().view(self._item)
        return items.reshape(num_layers, 2, num_tokens, self._rows.shape[-1])


class TorchKVPacker:
    """A cache on a GPU (works on any device). Copies on a stream of its own, never ahead of `fence`; waits for it."""

    def __init__(
        self,
        kv: torch.Tensor,
        pack: CopyChunk | None = None,
        unpack: CopyChunk | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._kv = kv
        self._pack = pack or _pack
        self._unpack = unpack or _unpack
        self._fence = fence
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(kv.device) if kv.is_cuda else None  # type: ignore[no-untyped-call]

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        slots = self._slots(chunk, block_table)
        with self._on_stream():
            if self._fence is not None:
                self._fence.wait_for_layers(self._stream, chunk.layer_end)
            payload = self._payload(chunk, out if out.device == self._kv.device else None)
            self._pack(self._kv, slots.to(self._kv.device), range(chunk.layer_start, chunk.layer_end), payload)
            if out.device != self._kv.device:
                out.copy_(payload.view(torch.uint8).view(-1), non_blocking=True)

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        slots = self._slots(chunk, block_table)
        with self._on_stream():
            if self._fence is not None:
                self._fence.wait_for_all(self._stream)  # kernels of the slots' last owner may still be on the way
            payload = self._payload(chunk, data.to(self._kv.device, non_blocking=True))
            self._unpack(self._kv, slots.to(self._kv.device), range(chunk.layer_start, chunk.layer_end), payload)

    def _payload(self, chunk: Chunk, data: torch.Tensor | None) -> torch.Tensor:
        """`data` (uint8, 1-D, on the device) or new memory, as [num_layers, 2, num_tokens, *row]."""
        row = self._kv.shape[4:]
        shape = (chunk.layer_end - chunk.layer_start, 2, chunk.token_end - chunk.token_start, *row)
        if data is None:
            return torch.empty(shape, dtype=self._kv.dtype, device=self._kv.device)
        return data.view(self._kv.dtype).view(shape)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):  # does nothing when there is none
            yield
        if self._stream is not None:
            self._stream.synchronize()

    def _slots(self, chunk: Chunk, block_table: tuple[int, ...]) -> torch.Tensor:
        num_slots = self._kv.shape[2] * self._kv.shape[3]
        return torch.from_numpy(_slots(chunk, block_table, self._kv.shape[3], num_slots))


def _pack(kv: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    rows = kv.view(torch.uint8)[layers.start : layers.stop].flatten(2, 3)
    payload.view(torch.uint8).copy_(rows.index_select(2, slots))


def _unpack(kv: torch.Tensor, slots: torch.Tensor, layers: range, payload: torch.Tensor) -> None:
    kv.view(torch.uint8)[layers.start : layers.stop].flatten(2, 3).index_copy_(2, slots, payload.view(torch.uint8))


def _slots(chunk: Chunk, block_table: tuple[int, ...], block_size: int, num_slots: int) -> npt.NDArray[np.int64]:
    """[num_tokens] slot of each of the chunk's tokens."""
    first_block = chunk.token_start // block_size
    blocks = np.asarray(block_table[first_block : -(-chunk.token_end // block_size)], dtype=np.int64)
    assert len(blocks) * block_size >= chunk.token_end - first_block * block_size, "block table too short"
    assert 0 <= blocks.min() <= blocks.max() < num_slots // block_size, "block table names no block"
    positions = np.arange(chunk.token_start, chunk.token_end, dtype=np.int64)
    return blocks[positions // block_size - first_block] * block_size + positions % block_size
