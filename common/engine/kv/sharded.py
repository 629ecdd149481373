"""The KV caches of all ranks of one worker, as rank 0's process sees them: what the handoff reads and writes.

Blocks have the same numbers on every rank. Each rank's cache lies in memory that its own process maps too, so that a
chunk's rows are put together from all of them, or dealt out to them, in one place; widths need not be equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.contract.kv_spec import KVSpec
from common.engine.kv.cache import KVCache, shared_cache_bytes
from common.engine.kv.shared import map_shared_memory, new_shared_memory
from common.values.ranks import Rank


@dataclass(frozen=True, slots=True, eq=False)
class KVShards:
    """`spec` is the whole model's; `caches` are by rank, each with what its rank holds."""

    spec: KVSpec
    caches: tuple[KVCache, ...]

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Of each group, on every rank."""
        return self.caches[0].num_blocks

    def free(self) -> None:
        """As `KVCache.free`, of all ranks."""
        for cache in self.caches:
            cache.free()


def new_shards(spec: KVSpec, num_blocks: Sequence[int], ranks: Sequence[Rank]) -> tuple[KVShards, list[int]]:
    """Empty caches, and the descriptors of each one's memory, which the caller hands on and closes."""
    specs = [spec.of_rank(rank) for rank in ranks]
    fds = [new_shared_memory(shared_cache_bytes(of_rank, num_blocks)) for of_rank in specs]
    caches = [
        KVCache(of_rank, num_blocks, shared=map_shared_memory(fd)) for of_rank, fd in zip(specs, fds, strict=True)
    ]
    return KVShards(spec, tuple(caches)), fds
