"""The KV cache tensor of one worker. Owns the memory; which block belongs to whom is the block pool's business."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """How one token's KV looks: what all workers of a model share, whatever their block size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """One allocation, [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim].

    `layers` are views of it, [2, num_blocks, block_size, num_kv_heads, head_dim] each. The memory is not initialised:
    readers stay below a sequence's length.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = torch.empty(
            (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.layers: tuple[torch.Tensor, ...] = self.data.unbind(0)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in all layers, as if at once: every source is read before any write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.data.device).unbind(1)
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))


def num_blocks_that_fit(kv_cache_bytes: int, shape: KVShape, block_size: int) -> int:
    """Blocks in a budget. Raises ValueError when not even one fits."""
    num_blocks = kv_cache_bytes // (shape.bytes_per_token * block_size)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes={kv_cache_bytes} is less than one block of {block_size} tokens")
    return num_blocks
