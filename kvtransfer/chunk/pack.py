"""Copies between the planes of a paged KV cache and the contiguous data of a chunk. Owns no memory and no thread.

The data of a chunk are its planes one after another, each [layers, tokens, bytes of the row], contiguous. What the
bytes mean does not matter to a copy, so there is one way for all planes.

On the CPU the copies are numpy's: they release the GIL and use this thread alone. torch's index_select and
index_copy_ wake torch's own pool and fight the forward pass for it: measured here beside a second torch thread,
0.1 to 0.5 GB/s, where numpy copies 35 to 45 GB/s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.kv_spec import KVGroup
from common.engine.kv.cache import KVCache
from common.engine.kv.sharded import KVShards
from common.values.ranks import ranks_of
from kvtransfer.events import Chunk

# Copies `columns` of the rows of some slots between a plane and a part of a chunk's data, as `gather_rows` and
# `scatter_rows` of `common.engine.devices.triton.chunk` do.
CopyRows = Callable[[torch.Tensor, torch.Tensor, slice, torch.Tensor], None]
# By their number of bytes.
_ITEMS = {dtype.itemsize: dtype for dtype in map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64))}
Bytes = TypeVar("Bytes", torch.Tensor, npt.NDArray[np.uint8])


class KVPacker(Protocol):
    """`block_table` is that of the chunk's group; entry i holds tokens [i * block_size, (i + 1) * block_size)."""

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        """Copy the chunk's rows into `out`: uint8, 1-D, the chunk's data bytes."""
        ...

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        """Inverse of `gather`."""
        ...

    def beside_compute(self) -> AbstractContextManager[None]:
        """What is copied within it does not wait for what the model computes, and is done at its end."""
        ...


def kv_packer(cache: KVCache | KVShards) -> KVPacker:
    """Access to `cache`, which must stay alive."""
    if isinstance(cache, KVShards) or cache.device.type == "cpu":
        return NumpyKVPacker(cache)
    from common.engine.devices.triton.chunk import gather_rows, scatter_rows  # imports triton

    return DeviceKVPacker(cache, gather_rows, scatter_rows)


class NumpyKVPacker:
    """A cache in CPU memory, or those of several ranks as if they were one: a shard is where its rank has it."""

    def __init__(self, cache: KVCache | KVShards) -> None:
        self._cache = cache
        caches = cache.caches if isinstance(cache, KVShards) else (cache,)
        self._holders = [
            (rank, [[plane.numpy() for plane in planes] for planes in _planes_as_bytes(of_rank)])
            for rank, of_rank in zip(ranks_of(len(caches)), caches, strict=True)
        ]

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        slots = _slots(self._cache, chunk, block_table)
        for plane, columns, part in self._parts(chunk, out, is_each_once=True):
            rows, at, target = _wide_items(plane, columns, part)
            for layer_rows, layer_target in zip(rows, target, strict=True):
                if layer_target.shape[1] == layer_rows.shape[1]:
                    # mode="clip" writes straight into `out`; "raise" would buffer. _slots has checked the range.
                    np.take(layer_rows, slots, axis=0, out=layer_target, mode="clip")
                else:
                    layer_target[:] = layer_rows[slots, at]

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        slots = _slots(self._cache, chunk, block_table)
        for plane, columns, part in self._parts(chunk, data, is_each_once=False):
            rows, at, source = _wide_items(plane, columns, part)
            for layer_rows, layer_source in zip(rows, source, strict=True):
                if layer_source.shape[1] == layer_rows.shape[1]:
                    layer_rows[slots] = layer_source
                else:
                    layer_rows[slots, at] = layer_source

    def beside_compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _parts(
        self, chunk: Chunk, data: torch.Tensor, *, is_each_once: bool
    ) -> Iterator[tuple[npt.NDArray[np.uint8], slice, npt.NDArray[np.uint8]]]:
        """As `_parts`, of each rank; `is_each_once`: a shard that several ranks hold, of the first of them alone."""
        group, done = self._cache.spec.groups[chunk.group_idx], chunk.shard_start
        wholes = [plane.row_bytes for plane in group.planes]
        for rank, groups in self._holders:
            held = group.held(rank)
            first, last = max(held.start, done), min(held.stop, chunk.shard_end)
            if first >= last:
                continue
            shards = range(first, last)
            yield from _parts_of(group, held, shards, wholes, groups[chunk.group_idx], chunk, data.numpy())
            done = last if is_each_once else done


class DeviceKVPacker:
    """A cache on a GPU. Copies on a stream of its own, never ahead of the cache's fence; waits for it."""

    def __init__(self, cache: KVCache, gather_rows: CopyRows, scatter_rows: CopyRows) -> None:
        self._cache = cache
        self._gather_rows = gather_rows
        self._scatter_rows = scatter_rows
        self._planes = _planes_as_bytes(cache)
        is_cuda = cache.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(cache.device) if is_cuda else None  # type: ignore[no-untyped-call]

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None:
        slots = _slots(self._cache, chunk, block_table)
        with self._on_stream():
            if self._cache.fence is not None:
                last_layer = self._cache.spec.groups[chunk.group_idx].layers[chunk.layer_end - 1]
                self._cache.fence.wait_for_layers(self._stream, last_layer + 1)
            on_device = out if out.device == self._cache.device else torch.empty_like(out, device=self._cache.device)
            self._copy(self._gather_rows, chunk, slots, on_device)
            if on_device is not out:
                out.copy_(on_device, non_blocking=True)

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None:
        slots = _slots(self._cache, chunk, block_table)
        with self._on_stream():
            if self._cache.fence is not None:
                self._cache.fence.wait_for_all(self._stream)  # kernels of the slots' last owner may still be on the way
            self._copy(self._scatter_rows, chunk, slots, data.to(self._cache.device, non_blocking=True))

    def beside_compute(self) -> AbstractContextManager[None]:
        return self._on_stream()

    def _copy(self, copy_rows: CopyRows, chunk: Chunk, slots: npt.NDArray[np.int64], data: torch.Tensor) -> None:
        on_device = torch.from_numpy(slots).to(self._cache.device)
        group = self._cache.spec.groups[chunk.group_idx]
        for plane, columns, part in _parts(group, self._planes[chunk.group_idx], chunk, data):
            copy_rows(plane, on_device, columns, part)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):  # does nothing when there is none
            yield
        if self._stream is not None:
            self._stream.synchronize()


def _planes_as_bytes(cache: KVCache) -> list[list[torch.Tensor]]:
    """Per group its planes, [num_layers, num_slots, row_bytes] uint8."""
    return [
        [
            memory.view(torch.uint8).view(memory.shape[0], -1, plane.row_bytes)
            for plane, memory in zip(group.planes, memories, strict=True)
        ]
        for group, memories in zip(cache.spec.groups, cache.planes, strict=True)
    ]


def _parts(group: KVGroup, planes: Sequence[Bytes], chunk: Chunk, data: Bytes) -> Iterator[tuple[Bytes, slice, Bytes]]:
    """Per plane of a chunk: its rows [layers, num_slots, row_bytes], the bytes of a row that the chunk has, and where
    in `data` they are: [layers, tokens, those bytes].
    """
    wholes = [plane.row_bytes for plane in group.planes]
    shards = range(chunk.shard_start, chunk.shard_end)
    return _parts_of(group, range(group.num_shards), shards, wholes, planes, chunk, data)


def _parts_of(
    group: KVGroup,
    held: range,
    shards: range,
    row_bytes: Sequence[int],
    planes: Sequence[Bytes],
    chunk: Chunk,
    data: Bytes,
) -> Iterator[tuple[Bytes, slice, Bytes]]:
    """Of some `shards` of the chunk, in planes whose rows have those `held`. `row_bytes`: per plane, of whole rows."""
    num_layers, num_tokens = chunk.layer_end - chunk.layer_start, chunk.token_end - chunk.token_start
    done = 0
    for memory, whole in zip(planes, row_bytes, strict=True):
        size = whole // group.num_shards
        columns = slice((shards.start - held.start) * size, (shards.stop - held.start) * size)
        width = (chunk.shard_end - chunk.shard_start) * size
        end = done + num_layers * num_tokens * width
        rows = memory[chunk.layer_start : chunk.layer_end]
        part = data[done:end].reshape(num_layers, num_tokens, width)
        at = slice((shards.start - chunk.shard_start) * size, (shards.stop - chunk.shard_start) * size)
        yield rows, columns, part[:, :, at]
        done = end
    assert done == len(data), f"expected {done} bytes of data, got {len(data)}"


def _wide_items(
    plane: npt.NDArray[np.uint8], columns: slice, part: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.generic], slice, npt.NDArray[np.generic]]:
    """As arrays of the widest items that fit: they copy faster than single bytes."""
    size = gcd(8, plane.shape[2], columns.start, columns.stop)
    item = _ITEMS[size]
    at = slice(columns.start // size, columns.stop // size)
    return plane.view(item), at, part.view(item)


def _slots(cache: KVCache | KVShards, chunk: Chunk, block_table: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """[num_tokens] slot of each of the chunk's tokens."""
    block_size = cache.block_size
    first_block = chunk.token_start // block_size
    blocks = np.asarray(block_table[first_block : -(-chunk.token_end // block_size)], dtype=np.int64)
    assert len(blocks) * block_size >= chunk.token_end - first_block * block_size, "block table too short"
    assert 0 <= blocks.min() <= blocks.max() < cache.num_blocks[chunk.group_idx], "block table names no block"
    positions = np.arange(chunk.token_start, chunk.token_end, dtype=np.int64)
    return blocks[positions // block_size - first_block] * block_size + positions % block_size
