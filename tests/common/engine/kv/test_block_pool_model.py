"""The block pool against a naive model, under random operations."""

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from common.engine.kv.block_pool import BlockPool, RefKind
from common.engine.scheduling.index_changes import IndexChanges
from common.values.ids import BlockHash

USED, HELD = RefKind.USED, RefKind.HELD


class NaivePool:
    """The same rules with plain lists: every owner is a (kind, blocks) pair."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners: list[tuple[RefKind, list[int]]] = []
        self.hashes: dict[int, BlockHash] = {}
        self.recency: list[int] = []  # unreferenced hashed blocks, oldest first

    def refs(self, kind: RefKind) -> Counter[int]:
        return Counter(block for owner_kind, blocks in self.owners if owner_kind is kind for block in blocks)

    def counts(self) -> tuple[int, int, int, int]:
        used, held = set(self.refs(USED)), set(self.refs(HELD))
        cached = set(self.hashes) - used - held
        return len(used), len(held - used), len(cached), self.num_blocks - len(used | held | cached)

    def is_referenced(self, block: int) -> bool:
        return any(block in blocks for _, blocks in self.owners)

    def own(self, kind: RefKind, blocks: list[int]) -> None:
        self.owners.append((kind, blocks))
        self.recency = [block for block in self.recency if block not in blocks]

    def disown(self, kind: RefKind, blocks: list[int]) -> None:
        self.owners.remove((kind, blocks))
        for block in reversed(blocks):
            if not self.is_referenced(block) and block in self.hashes and block not in self.recency:
                self.recency.append(block)

    def recycle(self, blocks: list[int], num_free: int) -> None:
        """`blocks` were handed out: free ones first, then the oldest cached ones, in order."""
        victims = blocks[num_free:]
        assert all(block not in self.hashes for block in blocks[:num_free])
        assert victims == self.recency[: len(victims)]
        for block in victims:
            del self.hashes[block]
        assert all(not self.is_referenced(block) for block in blocks)

    def longest(self, hashes: list[BlockHash]) -> int:
        found = set(self.hashes.values())
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in found), len(hashes))


class Pair:
    """Both pools side by side; every operation compares them."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.naive = NaivePool(num_blocks)
        self.changes = IndexChanges()
        self.index: set[BlockHash] = set()

    def allocate(self, num: int, kind: RefKind) -> list[int] | None:
        _, _, cached, free = self.naive.counts()
        allocation = self.pool.allocate(num, kind)
        assert (allocation is None) == (num > cached + free)
        if allocation is None:
            return None
        blocks = list(allocation.block_ids)
        assert len(set(blocks)) == num
        assert all(self.naive.hashes[block] == block_hash for block_hash, block in allocation.evicted.items())
        self.changes.evicted(allocation.evicted)
        self.naive.recycle(blocks, min(num, free))
        self.naive.own(kind, blocks)
        return blocks

    def match(self, hashes: list[BlockHash], kind: RefKind) -> list[int]:
        blocks = self.pool.match_prefix(hashes)
        assert len(blocks) == self.naive.longest(hashes)
        assert [self.naive.hashes[block] for block in blocks] == hashes[: len(blocks)]
        self.pool.acquire(blocks, kind)
        self.naive.own(kind, blocks)
        return blocks

    def release(self, blocks: list[int], kind: RefKind) -> None:
        self.pool.release(blocks, kind)
        self.naive.disown(kind, blocks)

    def register(self, block: int, block_hash: BlockHash) -> None:
        if block not in self.naive.hashes and self.naive.is_referenced(block):
            if self.pool.register(block, block_hash):
                self.changes.stored(block_hash)
            self.naive.hashes[block] = block_hash

    def check(self) -> None:
        self.pool.check_invariants()
        stats = self.pool.stats()
        assert (stats.used, stats.held, stats.cached, stats.free) == self.naive.counts()
        used, held = self.naive.refs(USED), self.naive.refs(HELD)
        assert all(self.pool.ref_count(b) == used[b] + held[b] for b in range(self.pool.num_blocks))
        stored, evicted = self.changes.take()
        assert not self.index & set(stored)
        assert self.index >= set(evicted)
        self.index = (self.index | set(stored)) - set(evicted)
        assert self.index == set(self.naive.hashes.values()) == set(self.pool.cached_hashes())


HASHES = [BlockHash(bytes([i])) for i in range(6)]
KINDS = st.sampled_from([USED, HELD])


class BlockPoolMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pair = Pair(num_blocks)

    @rule(target=tables, num=st.integers(0, 4), kind=KINDS)
    def allocate(self, num: int, kind: RefKind) -> object:
        blocks = self.pair.allocate(num, kind)
        return multiple() if blocks is None else [kind, blocks]

    @rule(target=tables, hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True), kind=KINDS)
    def match(self, hashes: list[BlockHash], kind: RefKind) -> object:
        return [kind, self.pair.match(hashes, kind)]

    @rule(target=tables, table=tables, kind=KINDS)
    def share(self, table: list[object], kind: RefKind) -> object:
        blocks = self._blocks(table)
        self.pair.pool.acquire(blocks, kind)
        self.pair.naive.own(kind, blocks)
        return [kind, list(blocks)]

    @rule(table=tables)
    def convert(self, table: list[object]) -> None:
        if not table:
            return
        source = table[0]
        assert isinstance(source, RefKind)
        target = HELD if source is USED else USED
        blocks = self._blocks(table)
        self.pair.pool.convert(blocks, source, target)
        self.pair.naive.owners.remove((source, blocks))
        self.pair.naive.owners.append((target, blocks))
        table[0] = target

    @rule(table=tables, block_hash=st.sampled_from(HASHES))
    def register(self, table: list[object], block_hash: BlockHash) -> None:
        for block in self._blocks(table)[:1]:
            self.pair.register(block, block_hash)

    @rule(table=tables)
    def release(self, table: list[object]) -> None:
        if table:
            kind = table[0]
            assert isinstance(kind, RefKind)
            self.pair.release(self._blocks(table), kind)
            table.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    @staticmethod
    def _blocks(table: list[object]) -> list[int]:
        blocks = table[1] if table else []
        assert isinstance(blocks, list)
        return blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_ten_thousand_random_operations_agree_with_the_model() -> None:
    rng = random.Random(7)
    pair = Pair(24)
    tables: list[tuple[RefKind, list[int]]] = []
    for _ in range(10_000):
        operation = rng.random()
        kind = rng.choice([USED, HELD])
        if operation < 0.35:
            blocks = pair.allocate(rng.randint(0, 6), kind)
            if blocks is not None:
                tables.append((kind, blocks))
        elif operation < 0.5:
            tables.append((kind, pair.match(rng.sample(HASHES, rng.randint(0, 4)), kind)))
        elif operation < 0.7 and tables:
            blocks = rng.choice(tables)[1]
            if blocks:
                pair.register(rng.choice(blocks), rng.choice(HASHES))
        elif tables:
            kind, blocks = tables.pop(rng.randrange(len(tables)))
            pair.release(blocks, kind)
        pair.check()
