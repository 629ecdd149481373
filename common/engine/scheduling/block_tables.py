"""The blocks of sequences: found in the prefix cache, reserved, grown, copied on write, given back. Pure: no IO.

The only caller of the pool on a worker apart from references that a transfer holds. Keeps what the prefix index has to
hear of: evictions as `allocate` returns them, full blocks as they are registered.
"""

from collections.abc import Mapping

from common.engine.kv.block_pool import BlockPool, RefKind
from common.engine.scheduling.index_changes import IndexChanges
from common.engine.scheduling.sequence import HashChain, Sequence
from common.values.hashing import block_hashes, hash_root
from common.values.request import Work


class BlockTables:
    """`watermark`: share of the pool that newcomers leave free, for sequences that grow; 0 where none does.

    `hash_fields`: what a token's KV depends on besides tokens and salt.
    """

    def __init__(self, pool: BlockPool, watermark: float, hash_fields: Mapping[str, str]) -> None:
        self.pool = pool
        self.index_changes = IndexChanges()
        self._watermark = watermark
        self._hash_fields = dict(hash_fields)

    def hashes_of(self, work: Work) -> HashChain:
        """Of all full blocks of a request's tokens."""
        root = hash_root(self._hash_fields, self.pool.block_size, work.cache_salt)
        return HashChain(root, block_hashes(work.token_ids, self.pool.block_size, root))

    def never_fits(self, num_tokens: int) -> str | None:
        """The reason, when the whole pool is too small for so many tokens."""
        if self.pool.num_blocks_for(num_tokens) <= self.pool.num_blocks:
            return None
        return f"{num_tokens} tokens never fit in {self.pool.num_blocks * self.pool.block_size}"

    def match(self, hashes: HashChain, num_tokens: int) -> list[int]:
        """Cached leading blocks of `num_tokens` tokens; never that of the last one, whose logits must be computed."""
        return self.pool.match_prefix(hashes.blocks[: (num_tokens - 1) // self.pool.block_size])

    def reserve(self, hit: list[int], num_tokens: int, kind: RefKind, num_running: int) -> tuple[int, ...] | None:
        """A block table for `num_tokens` tokens that starts with `hit`; None when there are too few blocks.

        Besides the watermark, each running sequence is left a block to grow by.
        """
        num_spare = self._num_spare(num_running)
        self.pool.acquire(hit, kind)
        num_fresh = self.pool.num_blocks_for(num_tokens) - len(hit)
        has_room = self.pool.num_available - num_fresh >= num_spare
        fresh = self._allocate(num_fresh, kind) if has_room else None
        if fresh is None:
            self.pool.release(hit, kind)
            return None
        return (*hit, *fresh)

    def fill(self, sequence: Sequence, num_running: int) -> bool:
        """Blocks for all tokens of a sequence that has none, cached ones where there are; False when too few are."""
        sequence.hashes.extend(sequence.token_ids, self.pool.block_size)
        hit = self.match(sequence.hashes, len(sequence.token_ids))
        block_table = self.reserve(hit, len(sequence.token_ids), RefKind.USED, num_running)
        if block_table is None:
            return False
        sequence.block_table = block_table
        sequence.num_cached_tokens = sequence.num_computed = len(hit) * self.pool.block_size
        return True

    def share(self, sequence: Sequence) -> tuple[int, ...]:
        """Its blocks for another sequence too; shared until one of them writes."""
        self.pool.acquire(sequence.block_table, RefKind.USED)
        return sequence.block_table

    def can_write(self, sequence: Sequence) -> bool:
        """The next position has a block that is this sequence's own."""
        idx = sequence.num_computed // self.pool.block_size
        return idx < len(sequence.block_table) and not self.pool.is_shared(sequence.block_table[idx])

    def grow(self, sequence: Sequence) -> tuple[tuple[int, int], ...] | None:
        """A block of its own for the next position: a new one, or the copy of a shared one. None = no block left.

        Returns what has to be copied first, as (source, target).
        """
        fresh = self._allocate(1, RefKind.USED)
        if fresh is None:
            return None
        idx = sequence.num_computed // self.pool.block_size
        shared = sequence.block_table[idx:]
        self.pool.release(shared, RefKind.USED)
        sequence.block_table = (*sequence.block_table[:idx], *fresh)
        return tuple((source, fresh[0]) for source in shared)

    def register(self, sequence: Sequence, start: int) -> None:
        """Full blocks whose last token stands at `start` or later become findable."""
        size = self.pool.block_size
        first, end = start // size, sequence.num_computed // size
        if first == end:
            return
        sequence.hashes.extend(sequence.token_ids, size)
        for block, block_hash in zip(sequence.block_table[first:end], sequence.hashes.blocks[first:end], strict=True):
            if self.pool.register(block, block_hash):
                self.index_changes.stored(block_hash)

    def distrust(self, sequence: Sequence) -> None:
        """Nothing of what is in its blocks is found again."""
        self.index_changes.evicted(self.pool.unregister(sequence.block_table))

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table, RefKind.USED)
        sequence.block_table = ()

    def _num_spare(self, num_running: int) -> int:
        stats = self.pool.stats()
        is_empty = stats.used == stats.held == 0
        return 0 if is_empty or not self._watermark else max(int(self._watermark * stats.total), num_running)

    def _allocate(self, num: int, kind: RefKind) -> tuple[int, ...] | None:
        allocation = self.pool.allocate(num, kind)
        if allocation is None:
            return None
        self.index_changes.evicted(allocation.evicted)
        return allocation.block_ids
