"""The blocks of sequences: found in the prefix cache, reserved, grown, copied on write, given back. Pure: no IO.

Each group of layers has a pool of its own, and a sequence one block table per group. In a group with a window:

* a block is released when no later token reads it: its place in the table stays, with `NO_BLOCK`;
* a prompt has blocks for the window and the chunk that is computed, which move on with it, and from the start those
  of its last window, which are shipped or decoded from; so a long one needs no more than a short one;
* a prefix hit needs no more than the last window of it; of a prompt that is received, no more than of the prompt's.

The only caller of the pools on a worker. Keeps what the prefix index has to hear of: evictions as `allocate` returns
them, full blocks as they are registered, both of the first group that has no window.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.engine.contract.kv_spec import first_token_needed
from common.engine.kv.block_pool import BlockPool, PoolStats, RefKind
from common.engine.scheduling.index_changes import IndexChanges
from common.engine.scheduling.sequence import NO_BLOCK, BlockTableSet, HashChain
from common.engine.scheduling.sequence import Sequence as ScheduledSequence
from common.values.hashing import block_hashes, hash_root
from common.values.ids import BlockHash
from common.values.request import Work


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """The blocks of one group of layers. `window`: a token is read by itself and the window - 1 tokens after it; 0 = by
    all later ones."""

    pool: BlockPool
    window: int = 0

    def first_block_needed(self, num_tokens: int) -> int:
        """Of the blocks of `num_tokens` tokens, the first that a later token reads."""
        return first_token_needed(num_tokens, self.window) // self.pool.block_size


class BlockTables:
    """`watermark`: share of a pool that newcomers leave free, for sequences that grow; 0 where none does.

    `hash_fields`: what a token's KV depends on besides tokens, salt and adapter. `max_chunk`: tokens of one step.
    """

    def __init__(
        self, groups: Sequence[PoolGroup], watermark: float, hash_fields: Mapping[str, str], max_chunk: int
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = groups[0].pool.block_size
        self._pools = [group.pool for group in groups]
        self.index_changes = IndexChanges()
        self._watermark = watermark
        self._hash_fields = dict(hash_fields)
        self._windowed = [idx for idx, group in enumerate(groups) if group.window]
        self._announced = next((group for group in groups if not group.window), groups[0]).pool
        self._max_moving = [self._max_moving_of(group, max_chunk) for group in groups]

    # ---- what there is ------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Of all groups together."""
        all_stats = [group.pool.stats() for group in self.groups]
        return PoolStats(*(sum(getattr(s, name) for s in all_stats) for name in PoolStats.__slots__))

    def reported_stats(self) -> PoolStats:
        """Of the first group that has no window: routers reckon in blocks of whole sequences."""
        return self._announced.stats()

    def cached_hashes(self) -> list[BlockHash]:
        """What the index should hold for this worker."""
        return self._announced.cached_hashes()

    def never_fits(self, num_tokens: int) -> str | None:
        """The reason, when a whole pool is too small for so many tokens."""
        for idx, group in enumerate(self.groups):
            if len(self._wanted(idx, 0, num_tokens)) > group.pool.num_blocks:
                return f"{num_tokens} tokens never fit in {group.pool.num_blocks * self.block_size}"
        return None

    def hashes_of(self, work: Work) -> HashChain:
        """Of all full blocks of a request's tokens."""
        root = hash_root(self._hash_fields, self.block_size, work.cache_salt, work.adapter.digest)
        return HashChain(root, block_hashes(work.token_ids, self.block_size, root))

    def match(self, hashes: HashChain, num_tokens: int) -> int:
        """How many leading blocks, of those that hold no more than `num_tokens` tokens, are cached, as far as later
        tokens read them. The token after those is the first whose logits must be computed."""
        num_blocks = self._num_whole(hashes, num_tokens)
        while not self._has_windows(hashes, num_blocks, num_blocks * self.block_size):
            num_blocks -= 1
        return num_blocks

    def match_received(self, hashes: HashChain, num_tokens: int) -> int:
        """How many leading blocks of a prompt of so many tokens need not be sent here. Of a group with a window nothing
        need be cached before the prompt's last window: what of that lies behind the hit is sent."""
        num_blocks = self.match(hashes, num_tokens - 1)
        if len(self._windowed) == len(self.groups):
            return num_blocks  # nothing says which tokens are the cached ones
        longest = self._num_whole(hashes, num_tokens - 1)
        return next(
            (num for num in range(longest, num_blocks, -1) if self._has_windows(hashes, num, num_tokens)), num_blocks
        )

    # ---- tables -------------------------------------------------------------------------------------

    def reserve(
        self, hashes: HashChain, num_hit: int, num_tokens: int, kind: RefKind, num_running: int
    ) -> BlockTableSet | None:
        """Tables for `num_tokens` tokens whose first `num_hit` blocks are cached; None when there are too few blocks.

        HELD: the rest is received. USED: it is computed here. Besides the watermark, each running sequence is left a
        block to grow by.
        """
        start = num_tokens if kind is RefKind.HELD else num_hit * self.block_size
        spare = [self._num_spare(group.pool, num_running) for group in self.groups]
        tables = [self._with_hits(idx, hashes, num_hit, start, num_tokens) for idx in range(len(self.groups))]
        self._acquire(tables, kind)
        missing = [
            [place for place in self._wanted(idx, start, num_tokens) if table[place] == NO_BLOCK]
            for idx, table in enumerate(tables)
        ]
        if any(
            group.pool.num_available - len(places) < num_spare
            for group, places, num_spare in zip(self.groups, missing, spare, strict=True)
        ):
            self.release_tables(tables, kind)
            return None
        for idx, places in enumerate(missing):
            self._put(idx, tables[idx], places, kind)
        return tuple(map(tuple, tables))

    def fill(self, sequence: ScheduledSequence, num_running: int) -> bool:
        """Blocks for a sequence that has none, cached ones where there are; False when there are too few."""
        sequence.hashes.extend(sequence.token_ids, self.block_size)
        num_tokens = len(sequence.token_ids)
        num_hit = self.match(sequence.hashes, sequence.num_reusable)
        tables = self.reserve(sequence.hashes, num_hit, num_tokens, RefKind.USED, num_running)
        if tables is None:
            return False
        sequence.block_tables = tables
        sequence.num_cached_tokens = sequence.num_computed = num_hit * self.block_size
        return True

    def share(self, sequence: ScheduledSequence) -> BlockTableSet:
        """Its blocks for another sequence too, if it has any; shared until one of them writes."""
        if not sequence.block_tables:
            return ()
        self._acquire(sequence.block_tables, RefKind.USED)
        return sequence.block_tables

    def hold(self, sequence: ScheduledSequence) -> BlockTableSet:
        """The blocks of its last window, HELD besides: they outlive the sequence."""
        firsts = [group.first_block_needed(len(sequence.token_ids)) for group in self.groups]
        tables = zip(sequence.block_tables, firsts, strict=True)
        held = tuple((NO_BLOCK,) * first + table[first:] for table, first in tables)
        self._acquire(held, RefKind.HELD)
        return held

    def use_held(self, tables: BlockTableSet) -> None:
        """HELD -> USED"""
        for group, table in zip(self.groups, tables, strict=True):
            group.pool.convert(_blocks(table), RefKind.HELD, RefKind.USED)

    def release(self, sequence: ScheduledSequence) -> None:
        self.release_tables(sequence.block_tables, RefKind.USED)
        sequence.block_tables = ()

    def release_tables(self, tables: Sequence[Sequence[int]], kind: RefKind) -> None:
        for group, table in zip(self.groups, tables, strict=False):  # a sequence without blocks has no tables
            group.pool.release(_blocks(table), kind)

    # ---- while a sequence runs ----------------------------------------------------------------------

    def can_write(self, sequence: ScheduledSequence) -> bool:
        """The next position has a block in each group that is this sequence's own."""
        place = sequence.num_computed // self.block_size
        for pool, table in zip(self._pools, sequence.block_tables, strict=True):
            if place == len(table) or pool.is_shared(table[place]):
                return False
        return True

    def grow(self, sequence: ScheduledSequence) -> list[tuple[int, int, int]] | None:
        """Blocks of its own for the next position: new ones, or copies of shared ones. None = too few are left.

        Returns what has to be copied first, as (group, source, target).
        """
        place, copies = sequence.num_computed // self.block_size, []
        tables = list(sequence.block_tables)
        lacking = [
            idx for idx, table in enumerate(tables) if place == len(table) or self._pools[idx].is_shared(table[place])
        ]
        if any(self.groups[idx].pool.num_available == 0 for idx in lacking):
            return None
        for idx in lacking:
            (block,) = self._allocate(idx, 1, RefKind.USED)
            shared = tables[idx][place:]
            copies += [(idx, source, block) for source in shared]
            self._pools[idx].release(shared, RefKind.USED)
            tables[idx] = (*tables[idx][:place], block)
        sequence.block_tables = tuple(tables)
        return copies

    def extend(self, sequence: ScheduledSequence, num_tokens: int, num_running: int) -> int:
        """Blocks for tokens behind the next one, drafts: for how many of `num_tokens`. The next one has its own.

        Only of blocks that nobody will soon need: each running sequence is left one to grow by.
        """
        end = sequence.num_computed + 1
        for pool, table in zip(self._pools, sequence.block_tables, strict=True):
            num_blocks = len(table) + max(0, pool.num_available - num_running)
            num_tokens = min(num_tokens, num_blocks * self.block_size - end)
        for idx, table in enumerate(sequence.block_tables):
            num_missing = max(0, self._pools[idx].num_blocks_for(end + num_tokens) - len(table))
            self._replace(sequence, idx, (*table, *self._allocate(idx, num_missing, RefKind.USED)))
        return num_tokens

    def shrink(self, sequence: ScheduledSequence) -> None:
        """Give back what lies behind its tokens: blocks of drafts that were not accepted."""
        num_blocks = self._pools[0].num_blocks_for(len(sequence.token_ids))
        for idx, table in enumerate(sequence.block_tables):
            if len(table) > num_blocks:
                self._pools[idx].release(table[num_blocks:], RefKind.USED)
                self._replace(sequence, idx, table[:num_blocks])

    def num_writable(self, sequence: ScheduledSequence, num_tokens: int) -> int:
        """Of the next tokens of a prompt, as many as have blocks: those of a window move on with it."""
        self.move_windows(sequence)
        for idx in self._windowed:
            table, place = sequence.block_tables[idx], sequence.num_computed // self.block_size
            if NO_BLOCK in table[place:]:
                room = table.index(NO_BLOCK, place) * self.block_size - sequence.num_computed
                num_tokens = min(num_tokens, max(0, room))
        return num_tokens

    def move_windows(self, sequence: ScheduledSequence) -> None:
        """Release the blocks that no later token reads; as many more for the tokens of a prompt that come next."""
        for idx in self._windowed:
            table = sequence.block_tables[idx]
            first = self.groups[idx].first_block_needed(sequence.num_computed)
            behind = _blocks(table[:first]) if first and table[first - 1] != NO_BLOCK else []
            if behind or not sequence.is_decoding:
                self._move_window(idx, sequence, first, behind)

    def register(self, sequence: ScheduledSequence, start: int) -> None:
        """Full blocks whose last token stands at `start` or later were computed: they become findable."""
        first, end = start // self.block_size, sequence.num_computed // self.block_size
        if first == end:
            return
        sequence.hashes.extend(sequence.token_ids, self.block_size)
        for idx in range(len(self.groups)):
            self._register(idx, sequence, first, end)

    def register_received(self, sequence: ScheduledSequence) -> None:
        """The same of a prompt that was received: of a windowed group only what later tokens read has come."""
        end = sequence.num_computed // self.block_size
        for idx, group in enumerate(self.groups):
            first_token = first_token_needed(sequence.num_computed, group.window)
            self._register(idx, sequence, -(-first_token // self.block_size), end)

    def distrust(self, sequence: ScheduledSequence) -> None:
        """Nothing of what is in its blocks is found again."""
        for group, table in zip(self.groups, sequence.block_tables, strict=True):
            gone = group.pool.unregister(_blocks(table))
            if group.pool is self._announced:
                self.index_changes.evicted(gone)

    # ---- private ------------------------------------------------------------------------------------

    def _max_moving_of(self, group: PoolGroup, max_chunk: int) -> int:
        """Blocks of a prompt for its window and the chunk that is computed; in a small pool with a smaller chunk."""
        window = group.pool.num_blocks_for(group.window) + 1  # it may begin within a block
        wanted = group.pool.num_blocks_for(group.window + max_chunk) + 1
        return max(window, min(wanted, group.pool.num_blocks - window))

    def _wanted(self, idx: int, start: int, num_tokens: int) -> list[int]:
        """Places of the blocks that a prompt of `num_tokens` has when `start` of them are there."""
        group = self.groups[idx]
        first, last = group.first_block_needed(start), group.first_block_needed(num_tokens)
        moving = range(first, min(first + self._max_moving[idx], last))
        return [*moving, *range(last, group.pool.num_blocks_for(num_tokens))]

    def _with_hits(self, idx: int, hashes: HashChain, num_hit: int, start: int, num_tokens: int) -> list[int]:
        """A table that has nothing but the cached blocks that are wanted."""
        pool = self.groups[idx].pool
        table = [NO_BLOCK] * pool.num_blocks_for(num_tokens)
        for place in self._wanted(idx, start, num_tokens):
            if place >= num_hit:
                break
            block = pool.find(hashes.blocks[place])
            assert block is not None, "a hit that is not there"
            table[place] = block
        return table

    def _num_whole(self, hashes: HashChain, num_tokens: int) -> int:
        """Leading blocks of `num_tokens` tokens that are cached in every group without a window."""
        num_blocks = num_tokens // self.block_size
        for group in self.groups:
            if not group.window:
                num_blocks = len(group.pool.match_prefix(hashes.blocks[:num_blocks]))
        return num_blocks

    def _has_windows(self, hashes: HashChain, num_blocks: int, num_tokens: int) -> bool:
        """Of the first `num_blocks` blocks those are cached that tokens behind `num_tokens` read in windowed groups."""
        return all(
            self._pools[idx].find(block_hash) is not None
            for idx in self._windowed
            for block_hash in hashes.blocks[self.groups[idx].first_block_needed(num_tokens) : num_blocks]
        )

    def _register(self, idx: int, sequence: ScheduledSequence, first: int, end: int) -> None:
        pool, table = self._pools[idx], sequence.block_tables[idx]
        for block, block_hash in zip(table[first:end], sequence.hashes.blocks[first:end], strict=True):
            is_new = block != NO_BLOCK and pool.register(block, block_hash)
            if is_new and pool is self._announced:
                self.index_changes.stored(block_hash)

    def _move_window(self, idx: int, sequence: ScheduledSequence, first: int, behind: list[int]) -> None:
        pool, table = self.groups[idx].pool, list(sequence.block_tables[idx])
        pool.release(behind, RefKind.USED)
        table[:first] = [NO_BLOCK] * first
        ahead = range(first, min(first + self._max_moving[idx], len(table)))
        missing = [place for place in ahead if table[place] == NO_BLOCK]
        self._put(idx, table, missing[: pool.num_available], RefKind.USED)
        self._replace(sequence, idx, tuple(table))

    def _replace(self, sequence: ScheduledSequence, idx: int, table: tuple[int, ...]) -> None:
        tables = sequence.block_tables
        sequence.block_tables = (*tables[:idx], table, *tables[idx + 1 :])

    def _put(self, idx: int, table: list[int], places: list[int], kind: RefKind) -> None:
        for place, block in zip(places, self._allocate(idx, len(places), kind), strict=True):
            table[place] = block

    def _allocate(self, idx: int, num: int, kind: RefKind) -> tuple[int, ...]:
        """The caller has seen that there are as many."""
        pool = self.groups[idx].pool
        allocation = pool.allocate(num, kind)
        assert allocation is not None, f"{num} blocks of {pool.num_available}"
        if pool is self._announced:
            self.index_changes.evicted(allocation.evicted)
        return allocation.block_ids

    def _acquire(self, tables: Sequence[Sequence[int]], kind: RefKind) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            group.pool.acquire(_blocks(table), kind)

    def _num_spare(self, pool: BlockPool, num_running: int) -> int:
        stats = pool.stats()
        is_empty = stats.used == stats.held == 0
        return 0 if is_empty or not self._watermark else max(int(self._watermark * stats.total), num_running)


def num_blocks(table_sets: Iterable[BlockTableSet]) -> int:
    """Different blocks in some sequences' tables."""
    places = ((idx, block) for tables in table_sets for idx, table in enumerate(tables) for block in table)
    return len({(idx, block) for idx, block in places if block != NO_BLOCK})


def _blocks(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]
