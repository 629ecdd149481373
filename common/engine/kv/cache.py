"""The KV cache tensor of one worker. Owns the memory; which block belongs to whom is the block pool's business."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.kv.fence import Fence, StreamFence
from common.engine.kv.pages import advise_huge_pages, give_back_pages
from common.engine.kv.quantized import is_quantized, row_bytes


@dataclass(frozen=True, slots=True)
class KVShape:
    """How one token's KV looks: what all workers of a model share, whatever their block size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # int8 and float8_e4m3fn: rows as in `common.engine.kv.quantized`

    @property
    def row(self) -> tuple[int, int]:
        """The last two dimensions of the cache: K or V of one token in one layer."""
        if is_quantized(self.dtype):
            return 1, row_bytes(self.num_kv_heads, self.head_dim)
        return self.num_kv_heads, self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.row[0] * self.row[1] * self.dtype.itemsize


class KVCache:
    """One allocation, [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim].

    Quantized: the last two dimensions are [1, row_bytes]. `layers` are views of it without the first dimension. The
    memory is not initialised: readers stay below a sequence's length.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = torch.empty(
            (shape.num_layers, 2, num_blocks, block_size, *shape.row),
            dtype=shape.dtype,
            device=device,
        )
        advise_huge_pages(self.data)
        self.layers: tuple[torch.Tensor, ...] = self.data.unbind(0)
        # None: what computes and what copies are in one order anyway
        self.fence: Fence | None = StreamFence(shape.num_layers) if self.data.is_cuda else None

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def free(self) -> None:
        """Let go of the memory; none may read or write it any more.

        Given back at once, whoever still holds a view: an ended role is a web of callbacks that refers to it, and lies
        about until the collector finds it. (Elsewhere than under Linux, where NumPy shares it, with the last view.)
        """
        storage = self.data.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            give_back_pages(self.data)
        self.data = torch.empty(0, dtype=self.data.dtype)
        self.layers = ()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in all layers, as if at once: every source is read before any write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.data.device).unbind(1)
        data = self.data.view(torch.uint8)
        data.index_copy_(2, targets, data.index_select(2, sources))


def num_blocks_that_fit(kv_cache_bytes: int, shape: KVShape, block_size: int) -> int:
    """Blocks in a budget. Raises ValueError when not even one fits."""
    num_blocks = kv_cache_bytes // (shape.bytes_per_token * block_size)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes={kv_cache_bytes} is less than one block of {block_size} tokens")
    return num_blocks
