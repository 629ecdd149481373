"""The KV cache of one worker. Owns the memory; which block belongs to whom is the block pool's business.

It knows groups, planes and rows (`common.engine.contract.kv_spec`), not what a row means.
"""

from collections.abc import Sequence
from math import prod
from mmap import PAGESIZE
from typing import TypeVar

import torch

from common.engine.contract.attention import LayerKV
from common.engine.contract.kv_spec import KVSpec, Plane
from common.engine.kv.fence import Fence, StreamFence
from common.engine.kv.pages import advise_huge_pages, give_back_pages, give_back_shared_pages

T = TypeVar("T")


class KVCache:
    """One allocation per plane of each group, [num_layers, num_blocks, block_size, *row].

    `layers` are views of them by the model's numbers of layers. The memory is not initialised: readers stay below a
    sequence's length.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: Sequence[int],
        device: torch.device | str = "cpu",
        shared: torch.Tensor | None = None,
    ) -> None:
        """`num_blocks` has a number for each group. `shared`: the memory to use, `shared_cache_bytes` of uint8."""
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self.device = torch.device(device)
        self._shared = shared
        take = _allocate if shared is None else _Pieces(shared).take
        self.planes = tuple(  # [group][plane]
            tuple(take(plane, (len(group.layers), count, spec.block_size), self.device) for plane in group.planes)
            for group, count in zip(spec.groups, self.num_blocks, strict=True)
        )
        self.layers = self._layers()
        self._group_of_layer = spec.group_of_layer
        # None: what computes and what copies are in one order anyway
        self.fence: Fence | None = StreamFence(spec.num_layers) if self.device.type == "cuda" else None

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for planes in self.planes for plane in planes)

    def free(self) -> None:
        """Let go of the memory; none may read or write it any more.

        Given back at once, even when views of it remain: an ended role is a web of callbacks that refers to it until
        the collector finds it. (Elsewhere than under Linux, where NumPy shares it, with the last view.)
        """
        if self._shared is not None:
            give_back_shared_pages(self._shared)
            self._shared, self.planes, self.layers = None, (), ()
            return
        for plane in (plane for planes in self.planes for plane in planes):
            storage = plane.untyped_storage()
            if storage.resizable():
                storage.resize_(0)
            else:
                give_back_pages(plane)
        self.planes, self.layers = (), ()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], group_idx: int = 0) -> None:
        """Copy whole blocks (source, target) of a group, as if at once: every source is read before any write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for plane in self.planes[group_idx]:
            data = plane.view(torch.uint8)
            data.index_copy_(1, targets, data.index_select(1, sources))

    def by_layer(self, of_groups: Sequence[T]) -> list[T]:
        """What is given for each group, for each layer."""
        return [of_groups[idx] for idx in self._group_of_layer]

    def _layers(self) -> tuple[LayerKV, ...]:
        by_number: dict[int, LayerKV] = {}
        for group, planes in zip(self.spec.groups, self.planes, strict=True):
            by_number |= dict(zip(group.layers, zip(*planes, strict=True), strict=True))
        return tuple(by_number[number] for number in range(self.spec.num_layers))


def shared_cache_bytes(spec: KVSpec, num_blocks: Sequence[int]) -> int:
    """Of the planes of a cache, each of which begins at a page."""
    return sum(
        _pages(len(group.layers) * count * spec.block_size * plane.row_bytes)
        for group, count in zip(spec.groups, num_blocks, strict=True)
        for plane in group.planes
    )


class _Pieces:
    """Planes in memory that is there."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, plane: Plane, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
        num_bytes = prod(size) * plane.row_bytes
        piece = self._memory[self._taken : self._taken + num_bytes]
        self._taken += _pages(num_bytes)
        return piece.view(getattr(torch, plane.dtype)).view(*size, *plane.shape)


def _pages(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGESIZE) * PAGESIZE


def _allocate(plane: Plane, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    data = torch.empty((*size, *plane.shape), dtype=getattr(torch, plane.dtype), device=device)
    advise_huge_pages(data)
    return data
