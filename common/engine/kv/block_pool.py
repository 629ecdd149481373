"""Who holds which KV block: reference counts, the prefix cache, and its eviction. Pure: ids only, no tensors, no IO.

A block is in exactly one of four states:

    used    some request computes with it          (a USED reference)
    held    reserved or in a handoff               (a HELD reference, none USED)
    cached  without references, its content is known by hash and can be found again
    free    without references, content worthless

    free --allocate--> used | held --release--> cached (hash registered) | free
    cached --acquire--> used | held;  cached --allocate, least recently released first--> used | held

Callers release whole block tables in order. Later blocks of a table are then recycled before earlier ones, so a
chain of hashes never loses a parent before its child, and the longest prefix can be found by scanning forward.

What can be found is changed by `register`, `unregister` and `allocate`; each returns what it changed, so that the
caller can tell the prefix index, or copy an evicted block away before it is written.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from common.values.ids import BlockHash


class RefKind(IntEnum):
    """Why a block is referenced. The values index the pool's counters."""

    USED = 0
    HELD = 1


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Number of blocks per state; used + cached + free + held == total."""

    total: int
    used: int
    cached: int
    free: int
    held: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks handed out. `evicted`: hashes that are not found any more -> the block that holds the content.

    The content is in place until the first write to the block: the moment at which another tier could take it.
    """

    block_ids: tuple[int, ...]
    evicted: dict[BlockHash, int]


class BlockPool:
    """Owns the state of `num_blocks` blocks. All operations are O(1) per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._used = [0] * num_blocks  # references per block
        self._held = [0] * num_blocks
        self._refs = (self._used, self._held)  # by RefKind
        self._num_used = 0
        self._num_held = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the most recently freed is warm in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._block_to_hash: list[BlockHash | None] = [None] * num_blocks
        self._hash_to_blocks: dict[BlockHash, dict[int, None]] = {}  # several blocks may hold the same content

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    def stats(self) -> PoolStats:
        return PoolStats(self.num_blocks, self._num_used, len(self._cached), len(self._free), self._num_held)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- references ---------------------------------------------------------------------------------

    def allocate(self, num: int, kind: RefKind) -> Allocation | None:
        """`num` blocks with one new reference each, or None and no change when fewer are available.

        Free blocks first, then cached ones, the least recently released first.
        """
        assert num >= 0
        if num > self.num_available:
            return None
        evicted: dict[BlockHash, int] = {}
        blocks = tuple(self._take_block(evicted) for _ in range(num))
        for block in blocks:
            self._add_ref(block, kind)
        return Allocation(blocks, evicted)

    def acquire(self, blocks: Sequence[int], kind: RefKind) -> None:
        """One more reference on each of `blocks`, which must be cached or referenced."""
        for block in blocks:
            self._check_id(block)
            assert self.ref_count(block) > 0 or block in self._cached, f"acquire of free block {block}"
            self._cached.pop(block, None)
            self._add_ref(block, kind)

    def release(self, blocks: Sequence[int], kind: RefKind) -> None:
        """One reference of `kind` less on each of `blocks`, a whole block table in order."""
        for block in reversed(blocks):
            self._drop_ref(block, kind)
            if self.ref_count(block) == 0:
                self._recycle(block)

    def convert(self, blocks: Sequence[int], source: RefKind, target: RefKind) -> None:
        """Turn one `source` reference on each of `blocks` into a `target` reference."""
        for block in blocks:
            self._drop_ref(block, source)
            self._add_ref(block, target)

    def num_refs(self, block: int, kind: RefKind) -> int:
        return self._refs[kind][block]

    def ref_count(self, block: int) -> int:
        return self._used[block] + self._held[block]

    def is_shared(self, block: int) -> bool:
        """More than one reference: a writer must copy it first."""
        return self.ref_count(block) > 1

    # ---- prefix cache -------------------------------------------------------------------------------

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks with the longest leading run of `hashes`. Takes no reference: acquire before anything else."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """A block with this content. Takes no reference: acquire before anything else."""
        candidates = self._hash_to_blocks.get(block_hash)
        return None if candidates is None else next(iter(candidates))

    def register(self, block: int, block_hash: BlockHash) -> bool:
        """The referenced, full `block` holds the content of `block_hash` and will not be written again.

        True when no other block holds it: from now on it can be found.
        """
        self._check_id(block)
        assert self.ref_count(block) > 0, f"register of unreferenced block {block}"
        if self._block_to_hash[block] == block_hash:
            return False
        assert self._block_to_hash[block] is None, f"block {block} is registered under another hash"
        self._block_to_hash[block] = block_hash
        copies = self._hash_to_blocks.setdefault(block_hash, {})
        copies[block] = None
        return len(copies) == 1

    def unregister(self, blocks: Sequence[int]) -> list[BlockHash]:
        """The content of these referenced blocks is not to be trusted. Returns the hashes not found any more."""
        for block in blocks:
            assert self.ref_count(block) > 0, f"unregister of unreferenced block {block}"
        return [gone for block in blocks if (gone := self._forget_hash(block)) is not None]

    def cached_hashes(self) -> list[BlockHash]:
        """Everything findable now, each hash once: what the index should hold for this worker."""
        return list(self._hash_to_blocks)

    # ---- invariants ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Every block is in exactly one state, and the cache's two maps mirror each other. O(num_blocks)."""
        used, held = self._used, self._held
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert min(used) >= 0
        assert min(held) >= 0
        assert self._num_used == sum(count > 0 for count in used)
        assert self._num_held == sum(h > 0 and u == 0 for u, h in zip(used, held, strict=True))
        for block in range(self.num_blocks):
            places = (self.ref_count(block) > 0) + (block in free) + (block in self._cached)
            assert places == 1, f"block {block} is in {places} states"
            assert block not in free or self._block_to_hash[block] is None, f"free block {block} has a hash"
            assert block not in self._cached or self._block_to_hash[block] is not None
        mirror = {(block, block_hash) for block_hash, blocks in self._hash_to_blocks.items() for block in blocks}
        assert mirror == {(b, h) for b, h in enumerate(self._block_to_hash) if h is not None}
        assert all(self._hash_to_blocks.values()), "a hash without blocks"
        stats = self.stats()
        assert stats.used + stats.cached + stats.free + stats.held == stats.total

    # ---- private ------------------------------------------------------------------------------------

    def _take_block(self, evicted: dict[BlockHash, int]) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        block_hash = self._forget_hash(block)
        if block_hash is not None:
            evicted[block_hash] = block
        return block

    def _recycle(self, block: int) -> None:
        if self._block_to_hash[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _forget_hash(self, block: int) -> BlockHash | None:
        """The hash that cannot be found any more; None when another copy is left, or there was none."""
        block_hash = self._block_to_hash[block]
        if block_hash is None:
            return None
        self._block_to_hash[block] = None
        copies = self._hash_to_blocks[block_hash]
        del copies[block]
        if copies:
            return None
        del self._hash_to_blocks[block_hash]
        return block_hash

    def _add_ref(self, block: int, kind: RefKind) -> None:
        self._count(block, -1)
        self._refs[kind][block] += 1
        self._count(block, +1)

    def _drop_ref(self, block: int, kind: RefKind) -> None:
        self._check_id(block)
        assert self._refs[kind][block] > 0, f"release of {kind.name} reference on block {block} that has none"
        self._count(block, -1)
        self._refs[kind][block] -= 1
        self._count(block, +1)

    def _count(self, block: int, sign: int) -> None:
        if self._used[block] > 0:
            self._num_used += sign
        elif self._held[block] > 0:
            self._num_held += sign

    def _check_id(self, block: int) -> None:
        assert 0 <= block < self.num_blocks, f"no block {block} in a pool of {self.num_blocks}"
