"""More than one group of layers: a windowed group's blocks follow the window, in both roles, whatever happens."""

import random
from collections.abc import Callable

import pytest

from common.engine.kv.block_pool import BlockPool, RefKind
from common.engine.scheduling.block_tables import BlockTables, PoolGroup
from common.engine.scheduling.sequence import NO_BLOCK, HashChain
from common.values.hashing import block_hashes, hash_root
from common.values.messages import FirstTokens, Granted
from common.values.request import Work
from tests.core_bench import CoreBench, tokens
from tests.decode_worker import harness as decode
from tests.decode_worker.harness import job
from tests.prefill_worker import harness as prefill
from tests.prefill_worker.harness import prompt
from tests.simkit.fake_engine import expected_output

SIZE, WINDOW = 4, 6
ROOT = hash_root({}, SIZE)


def groups(num_blocks: int = 256, num_windowed: int = 64, window: int = WINDOW) -> list[PoolGroup]:
    return [PoolGroup(BlockPool(num_blocks, SIZE)), PoolGroup(BlockPool(num_windowed, SIZE), window)]


def num_windowed_used(bench: CoreBench) -> int:
    stats = bench.core.blocks.groups[1].pool.stats()
    return stats.used + stats.held


def most_used(bench: CoreBench) -> int:
    """Blocks of the windowed group at most, until nothing runs."""
    most = num_windowed_used(bench)
    while bench.plan is not None:
        bench.step()
        most = max(most, num_windowed_used(bench))
    return most


# ---- the tables alone -------------------------------------------------------------------------------


def chain(num_tokens: int) -> HashChain:
    return HashChain(ROOT, block_hashes(tokens(num_tokens), SIZE, ROOT))


def tables_with(cached: list[list[int]]) -> BlockTables:
    """In whose pools the given places of a 40-token chain are cached, per group."""
    tables = BlockTables(groups(), 0.0, {}, max_chunk=8)
    for group, places in zip(tables.groups, cached, strict=True):
        for place in places:
            allocation = group.pool.allocate(1, RefKind.USED)
            assert allocation is not None
            group.pool.register(allocation.block_ids[0], chain(40).blocks[place])
            group.pool.release(allocation.block_ids, RefKind.USED)
    return tables


@pytest.mark.parametrize(
    ("full", "windowed", "num_hit"),
    [
        (range(9), range(9), 9),
        (range(9), [7, 8], 9),  # tokens 31 to 35 are all that token 36 reads
        (range(9), [8], 0),
        (range(9), [5, 6, 8], 7),
        (range(5), range(9), 5),
        (range(5), [7, 8], 0),
        ([], range(9), 0),
        (range(9), [0], 1),
    ],
)
def test_a_hit_needs_the_whole_chain_in_a_full_group_and_the_last_window_in_another(
    full: range, windowed: list[int], num_hit: int
) -> None:
    assert tables_with([list(full), list(windowed)]).match(chain(40), 39) == num_hit


@pytest.mark.parametrize(
    ("full", "windowed", "num_hit"),
    [
        (range(8), [], 8),  # token 40 reads from token 35 on: all of it is sent
        (range(9), [], 8),
        (range(9), [8], 9),  # tokens 32 to 35 are here, the others sent
        (range(5), range(9), 5),
        (range(3), [], 3),
        ([], range(9), 0),
    ],
)
def test_of_a_prompt_that_is_received_only_its_own_last_window_need_be_cached(
    full: range, windowed: list[int], num_hit: int
) -> None:
    tables = tables_with([list(full), list(windowed)])
    assert tables.match_received(chain(40), 40) == num_hit
    reserved = tables.reserve(chain(40), num_hit, 40, RefKind.HELD, 0)
    assert reserved is not None
    assert [place for place, block in enumerate(reserved[1]) if block != NO_BLOCK] == [8, 9]


def test_where_all_layers_have_a_window_nothing_is_found_that_is_not_cached() -> None:
    tables = BlockTables([PoolGroup(BlockPool(64, SIZE), WINDOW)], 0.0, {}, max_chunk=8)
    assert tables.match_received(chain(40), 40) == 0


def test_a_hit_takes_from_the_windowed_group_what_its_last_window_covers() -> None:
    tables = tables_with([list(range(9)), list(range(9))])
    reserved = tables.reserve(chain(40), 9, 40, RefKind.USED, 0)
    assert reserved is not None
    assert NO_BLOCK not in reserved[0]
    assert [place for place, block in enumerate(reserved[1]) if block != NO_BLOCK] == [7, 8, 9]


def test_what_is_received_has_only_the_last_window() -> None:
    tables = tables_with([[], []])
    reserved = tables.reserve(chain(40), 0, 40, RefKind.HELD, 0)
    assert reserved is not None
    assert [place for place, block in enumerate(reserved[1]) if block != NO_BLOCK] == [8, 9]
    tables.release_tables(reserved, RefKind.HELD)
    assert tables.stats().held == 0


def test_a_reservation_that_one_group_has_no_room_for_takes_nothing_of_the_others() -> None:
    tables = BlockTables(groups(num_windowed=2), 0.0, {}, max_chunk=8)
    assert tables.groups[1].pool.allocate(1, RefKind.USED) is not None
    assert tables.reserve(chain(40), 0, 40, RefKind.HELD, 0) is None
    assert tables.groups[0].pool.stats().held == 0


def test_a_received_block_that_came_in_part_is_not_found_again() -> None:
    """Tokens 35 to 39 of 40 are read by later ones, and were sent; block 8 has tokens 32 to 35."""
    bench = decode.Bench(block_size=SIZE, groups=groups())
    bench.start(job("a", tokens(40), 20))
    windowed = bench.core.blocks.groups[1].pool
    hashes = bench.core.blocks.hashes_of(job("a", tokens(40))).blocks
    assert [windowed.find(block_hash) is not None for block_hash in hashes[8:]] == [False, True]


@pytest.mark.parametrize(("end", "num_cached"), [(0, 32), (9, 40), (100, 40)])
def test_a_decode_worker_is_sent_of_what_it_has_only_the_last_window(end: int, num_cached: int) -> None:
    """A prompt that it was sent before, alone and as the beginning of a longer one."""
    bench = decode.Bench(block_size=SIZE, groups=groups())
    bench.start(job("a", tokens(40), 2))
    bench.run_all()
    longer = job("b", tokens(40) + tokens(end, first=900), 20)
    bench.reserve(longer)
    assert bench.messages("b")[-1] == Granted(longer.attempt_id, num_cached, is_local=False)
    bench.deliver(longer)
    bench.run_all()
    assert bench.output("b") == expected_output(longer, 0)
    assert bench.counts() == (0, 0)


def test_the_index_hears_of_the_group_without_a_window() -> None:
    bench = prefill.Bench(block_size=SIZE, budget=8, groups=groups())
    bench.prefill(prompt("a", tokens(40)))
    bench.run_all()
    assert len(bench.core.blocks.cached_hashes()) == 10


# ---- in a core --------------------------------------------------------------------------------------


def test_memory_of_a_prompt_is_flat_beyond_the_window() -> None:
    """Whatever its length, and its last window is there for the transfer until that ends."""
    most = []
    for length in (40, 200, 800):
        bench = prefill.Bench(block_size=SIZE, budget=8, groups=groups())
        message = prompt("a", tokens(length))
        bench.prefill(message)
        most.append(most_used(bench))
        first = bench.first_tokens("a").tokens[0].token.token_id
        assert first == expected_output(message.work, 0)[0]
        assert num_windowed_used(bench) == 2
        bench.acknowledge("a")
        assert bench.counts() == (0, 0)
    assert len(set(most)) == 1
    assert most[0] < 40 // SIZE


@pytest.mark.parametrize("local", [0, 1000])
def test_memory_of_a_stream_is_flat_beyond_the_window(local: int) -> None:
    for max_tokens in (20, 100):
        bench = decode.Bench(block_size=SIZE, budget=8, groups=groups())
        work = job("a", tokens(30), max_tokens)
        bench.reserve(work, local)
        if not local:
            bench.deliver(work)
            assert num_windowed_used(bench) == 2
        most = most_used(bench)
        assert bench.output("a") == expected_output(work, 0)
        assert most <= (7 if local else 3)
        assert bench.counts() == (0, 0)


def test_a_prefix_is_hit_after_its_first_blocks_have_left_the_windowed_group() -> None:
    bench = prefill.Bench(block_size=SIZE, budget=16, groups=groups(num_windowed=16))
    bench.prefill(prompt("a", tokens(100)))
    bench.run_all()
    bench.acknowledge("a")
    longer = prompt("b", tokens(100) + tokens(9, first=900))
    bench.prefill(longer)
    bench.run_all()
    assert bench.first_tokens("b").num_cached_tokens == 100
    assert bench.first_tokens("b").tokens[0].token.token_id == expected_output(longer.work, 0)[0]


def test_a_prompt_computes_smaller_chunks_where_the_windowed_group_is_small() -> None:
    bench = prefill.Bench(block_size=SIZE, budget=64, groups=groups(num_windowed=8))
    message = prompt("a", tokens(120))
    bench.prefill(message)
    assert 0 < sum(bench.scheduled().values()) < 64
    bench.run_all()
    assert bench.first_tokens("a").tokens[0].token.token_id == expected_output(message.work, 0)[0]


def test_forks_copy_the_shared_block_of_each_group() -> None:
    bench = decode.Bench(block_size=SIZE, groups=groups())
    work = job("a", tokens(18), 12, choices=(0, 1, 2))
    bench.start(work)
    assert bench.plan is not None
    assert sorted(group for group, _, _ in bench.plan.block_copies) == [0, 0, 1, 1]
    bench.run_all()
    assert [bench.output("a", choice) for choice in work.choices] == [expected_output(work, c) for c in work.choices]


@pytest.mark.parametrize("short_of", [0, 1])
def test_preempted_for_want_of_blocks_of_either_group_is_exact(short_of: int) -> None:
    """Two sequences of 3 and later 6 blocks; with a window of 12 each has 4 blocks of the windowed group at most."""
    pools = [groups(num_blocks=8), groups(num_windowed=6, window=12)][short_of]
    bench = decode.Bench(block_size=SIZE, groups=pools, budget=8)
    jobs = [job(f"r{i}", tokens(12, first=1000 * i), 13) for i in range(2)]
    for work in jobs:
        bench.reserve(work)
    for work in jobs:
        bench.deliver(work)
    bench.run_all()
    assert bench.core.stats(bench.now_s).num_preemptions >= 1
    assert [bench.output(f"r{i}") for i in range(2)] == [expected_output(work, 0) for work in jobs]
    assert bench.counts() == (0, 0)


# ---- a random life ----------------------------------------------------------------------------------


def random_groups(rng: random.Random) -> list[PoolGroup]:
    window, size = rng.randint(1, 9), rng.choice([2, 4, 5])
    least = 2 * (-(-window // size) + 1) + 2
    windowed = BlockPool(rng.randint(least, 3 * least), size)
    return [PoolGroup(BlockPool(rng.randint(16, 40), size)), PoolGroup(windowed, window)]


def random_work(rng: random.Random, name: str, max_tokens: int) -> Work:
    prefix = tokens(rng.choice([0, 8, 16, 23]), first=100)
    token_ids = prefix + tokens(rng.randint(1, 20), first=rng.choice([500, 600]))
    return job(name, token_ids, max_tokens, choices=tuple(range(rng.choice([1, 1, 2]))), priority=rng.choice([0, 0, 1]))


@pytest.mark.parametrize("seed", range(30))
def test_random_prompts_are_exact_and_leave_nothing(seed: int) -> None:
    """The runner checks that each token finds its window; the harness, every reference after every event."""
    rng = random.Random(seed)
    pools = random_groups(rng)
    bench = prefill.Bench(groups=pools, budget=rng.choice([1, 3, 8, 64]), max_num_seqs=rng.choice([1, 2, 8]))
    works = [random_work(rng, f"r{i}", 4) for i in range(30)]
    for work in works:
        bench.prefill(prompt(work.attempt_id.request_id, work.token_ids, choices=work.choices, priority=work.priority))
        for _ in range(rng.randint(0, 3)):
            rng.choice([*([bench.step] if bench.plan else []), lambda: acknowledge_all(bench, rng)])()
    while bench.plan is not None or bench.sender.active:
        bench.run_all()
        acknowledge_all(bench, rng)
    assert bench.counts() == (0, 0)
    for work in works:
        for answer in bench.messages(work.attempt_id.request_id):
            if isinstance(answer, FirstTokens):
                expected = [expected_output(prompt("x", work.token_ids).work, choice)[0] for choice in work.choices]
                assert [event.token.token_id for event in answer.tokens] == expected


def acknowledge_all(bench: prefill.Bench, rng: random.Random) -> None:
    for transfer_id in bench.computed():
        bench.acknowledge(transfer_id.attempt_id.request_id)


@pytest.mark.parametrize("seed", range(40))
def test_random_streams_are_exact_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    bench = decode.Bench(
        groups=random_groups(rng), budget=rng.choice([1, 3, 8, 64]), max_num_seqs=rng.choice([1, 2, 4, 8])
    )
    works = {f"r{i}": random_work(rng, f"r{i}", rng.randint(1, 14)) for i in range(30)}
    cancelled = set()

    def deliver() -> None:
        for attempt_id in list(bench.receiver.expected)[:1]:
            bench.deliver(works[attempt_id.request_id])

    def cancel() -> None:
        cancelled.add(name := rng.choice(list(works)))
        bench.cancel(name)

    for work in works.values():
        bench.reserve(work, local=rng.choice([0, 0, 4, 100]))
        actions: list[Callable[[], object]] = [deliver, deliver, cancel]
        for _ in range(rng.randint(0, 4)):
            rng.choice([*actions, *([bench.step] * 4 if bench.plan else [])])()
    while bench.plan is not None or bench.receiver.expected:
        bench.run_all()
        deliver()
    assert bench.counts() == (0, 0)
    for name, work in works.items():
        is_granted = isinstance(bench.messages(name)[0], Granted)
        for choice in work.choices if is_granted and name not in cancelled else ():
            assert bench.output(name, choice) == expected_output(work, choice), name
