"""How KV is cut into chunks, and the check that chunks tile a request."""

import random
from collections import Counter

import pytest

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.values.ranks import Rank
from kvtransfer.chunk.plan import FRAME_BYTES, MAX_OVER_MIN, ChunkCutter, ChunkPlanner, linked_shards
from kvtransfer.events import Chunk
from kvtransfer.receiver.coverage import Coverage
from tests.caches import row_spec

PLANNER = ChunkPlanner(row_spec(4, 100), min_chunk_bytes=1000)


def rectangles(chunks: list[Chunk]) -> list[tuple[int, int, int, int]]:
    return [(c.layer_start, c.layer_end, c.token_start, c.token_end) for c in chunks]


def test_a_layer_that_reaches_the_minimum_goes_alone() -> None:
    cutter = ChunkCutter(PLANNER, 0, 20)
    assert [rectangles(cutter.advance(layers, 20)) for layers in (1, 2, 3, 4)] == [
        [(0, 1, 0, 20)],
        [(1, 2, 0, 20)],
        [(2, 3, 0, 20)],
        [(3, 4, 0, 20)],
    ]
    assert cutter.finish() == []


def test_small_layers_are_sent_together_and_the_last_ones_as_they_are() -> None:
    cutter = ChunkCutter(PLANNER, 0, 4)
    assert [rectangles(cutter.advance(layers, 4)) for layers in (1, 2, 3, 4)] == [
        [],
        [],
        [(0, 3, 0, 4)],
        [(3, 4, 0, 4)],
    ]


def test_a_token_range_with_layers_above_the_maximum_is_split_evenly() -> None:
    cutter = ChunkCutter(PLANNER, 0, 90)
    chunks = cutter.advance(1, 90)
    assert rectangles(chunks) == [(0, 1, 0, 30), (0, 1, 30, 60), (0, 1, 60, 90)]
    assert max(chunk.num_bytes for chunk in chunks) <= MAX_OVER_MIN * 1000 + FRAME_BYTES


def test_growing_tokens_complete_the_range_before() -> None:
    cutter = ChunkCutter(PLANNER, 0, 40)
    cutter.advance(1, 20)
    assert rectangles(cutter.advance(1, 40)) == [(1, 2, 0, 20), (2, 3, 0, 20), (3, 4, 0, 20), (0, 1, 20, 40)]


def test_tokens_below_the_first_are_not_sent() -> None:
    cutter = ChunkCutter(PLANNER, 30, 50)
    assert cutter.advance(4, 16) == []
    assert cutter.advance(4, 30) == []
    assert rectangles(cutter.advance(1, 45)) == [(0, 1, 30, 45)]


def test_finish_cuts_what_is_left_and_a_repeated_report_cuts_nothing() -> None:
    cutter = ChunkCutter(PLANNER, 0, 20)
    cutter.advance(2, 20)
    assert cutter.advance(2, 20) == []
    assert rectangles(cutter.finish()) == [(2, 3, 0, 20), (3, 4, 0, 20)]
    assert cutter.finish() == []


@pytest.mark.parametrize(
    ("num_layers", "token_end"), [(5, 20), (-1, 20), (1, 61), (1, 20), (4, 19)], ids=lambda value: str(value)
)
def test_computing_backwards_or_past_the_end_is_an_error(num_layers: int, token_end: int) -> None:
    cutter = ChunkCutter(PLANNER, 0, 60)
    cutter.advance(2, 20)
    with pytest.raises(ValueError):
        cutter.advance(num_layers, token_end)


@pytest.mark.parametrize(("first_token", "num_tokens"), [(5, 5), (6, 5), (-1, 5)])
def test_a_transfer_of_nothing_is_an_error(first_token: int, num_tokens: int) -> None:
    with pytest.raises(ValueError):
        ChunkCutter(PLANNER, first_token, num_tokens)


@pytest.mark.parametrize("step", [1, 7, 16, 24, 100])
def test_every_cell_is_cut_exactly_once_whatever_the_prefill_chunks(step: int) -> None:
    """The last half-filled block of a prefill chunk is not shipped twice, nor never."""
    cutter, coverage = ChunkCutter(PLANNER, 3, 100), Coverage(PLANNER, 3, 100)
    chunks = []
    for token_end in [*range(step, 100, step), 100]:
        for layers in range(1, 5):
            chunks += cutter.advance(layers, token_end)
    assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
    assert [coverage.add(chunk) for chunk in chunks] == [None] * len(chunks)
    assert coverage.is_complete
    assert all(PLANNER.problem(chunk) is None for chunk in chunks)


def test_random_computations_are_tiled_exactly() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        num_layers = rng.randint(1, 9)
        planner = ChunkPlanner(row_spec(num_layers, rng.choice([4, 96, 1536])), rng.choice([1, 500, 5000]))
        num_tokens = rng.randint(1, 200)
        first_token = rng.randrange(num_tokens)
        cutter, coverage = (
            ChunkCutter(planner, first_token, num_tokens),
            Coverage(planner, first_token, num_tokens),
        )
        chunks, token_end = [], 0
        while token_end < num_tokens and rng.random() < 0.95:
            token_end = min(num_tokens, token_end + rng.randint(1, 60))
            layers = sorted(rng.randint(0, num_layers) for _ in range(rng.randint(0, 4)))
            chunks += [chunk for count in layers for chunk in cutter.advance(count, token_end)]
        chunks += cutter.finish()
        assert [coverage.add(chunk) for chunk in chunks] == [None] * len(chunks), f"seed {seed}"
        assert coverage.is_complete, f"seed {seed}"
        assert cutter.num_chunks == len(chunks)


def test_the_announced_length_must_be_what_the_rectangle_says() -> None:
    good = Chunk(0, 1, 3, 10, 20, FRAME_BYTES + 2 * 10 * 100)
    assert PLANNER.problem(good) is None
    assert PLANNER.problem(Chunk(0, 1, 3, 10, 20, good.num_bytes + 1)) == "chunk 0: expected 2064 bytes, announced 2065"
    for layers, tokens in [((3, 3), (0, 1)), ((0, 5), (0, 1)), ((0, 1), (2, 2)), ((2, 1), (0, 1))]:
        assert PLANNER.problem(Chunk(0, *layers, *tokens, good.num_bytes)) is not None


@pytest.mark.parametrize(
    "second",
    [
        Chunk(1, 0, 2, 0, 10, 0),
        Chunk(1, 1, 3, 5, 15, 0),
        Chunk(1, 1, 2, 9, 10, 0),
        Chunk(1, 0, 1, 10, 21, 0),
        Chunk(1, 0, 1, 0, 1, 0),
    ],
)
def test_overlapping_or_outlying_chunks_are_named(second: Chunk) -> None:
    coverage = Coverage(PLANNER, 0, 20)
    assert coverage.add(Chunk(0, 0, 2, 0, 10, 0)) is None
    problem = coverage.add(second)
    assert problem is not None
    assert problem.startswith("chunk 1: ")
    assert not coverage.is_complete


def test_chunks_may_come_in_any_order() -> None:
    chunks = [Chunk(0, layer, layer + 1, start, start + 5, 0) for layer in range(4) for start in (0, 5, 10, 15)]
    random.Random(3).shuffle(chunks)
    coverage = Coverage(PLANNER, 0, 20)
    assert not any(coverage.add(chunk) for chunk in chunks)
    assert coverage.is_complete


# ---- groups -----------------------------------------------------------------------------------------

# Layers 0, 1 and 3 see the last 16 tokens, layers 2 and 4 all of them.
HEADS = Plane("k", (4, 5), "int8", is_sharded=True)
MIXED = KVSpec(16, (KVGroup((2, 4), (HEADS,)), KVGroup((0, 1, 3), (HEADS,), window=16)))


def boxes(chunks: list[Chunk]) -> list[tuple[int, int, int, int, int]]:
    return [(chunk.group_idx, *box) for chunk, box in zip(chunks, rectangles(chunks), strict=True)]


def test_each_groups_layers_become_ready_as_the_model_computes_them() -> None:
    cutter = ChunkCutter(ChunkPlanner(MIXED, min_chunk_bytes=1), 0, 4)
    found = [boxes(cutter.advance(layers, 4)) for layers in range(1, 6)]
    first_rows, windowed_rows = [(0, 0, 1, 0, 4), (0, 1, 2, 0, 4)], [(1, 0, 1, 0, 4), (1, 1, 2, 0, 4), (1, 2, 3, 0, 4)]
    assert [[box[:3] for box in step if box[3] == 0] for step in found] == [
        [windowed_rows[0][:3]],
        [windowed_rows[1][:3]],
        [first_rows[0][:3]],
        [windowed_rows[2][:3]],
        [first_rows[1][:3]],
    ]


@pytest.mark.parametrize(("first_token", "windowed_from"), [(0, 85), (90, 90)])
def test_of_a_windowed_group_only_what_the_next_token_reads_is_shipped(first_token: int, windowed_from: int) -> None:
    """The token at position 100 reads positions 85 to 99 and itself."""
    planner = ChunkPlanner(MIXED, min_chunk_bytes=200)
    cutter, coverage = ChunkCutter(planner, first_token, 100), Coverage(planner, first_token, 100)
    chunks = []
    for token_end in (30, 60, 95, 100):
        for layers in range(1, 6):
            chunks += cutter.advance(layers, token_end)
    chunks += cutter.finish()
    cells = Counter(
        (chunk.group_idx, layer, token)
        for chunk in chunks
        for layer in range(chunk.layer_start, chunk.layer_end)
        for token in range(chunk.token_start, chunk.token_end)
    )
    expected = {(0, layer, token) for layer in range(2) for token in range(first_token, 100)}
    expected |= {(1, layer, token) for layer in range(3) for token in range(windowed_from, 100)}
    assert cells == dict.fromkeys(expected, 1)
    assert [coverage.add(chunk) for chunk in chunks] == [None] * len(chunks)
    assert coverage.is_complete
    assert all(planner.problem(chunk) is None for chunk in chunks)


def test_tokens_behind_the_window_are_not_taken_and_groups_do_not_stand_in_for_each_other() -> None:
    coverage = Coverage(ChunkPlanner(MIXED, min_chunk_bytes=1), 0, 100)
    assert coverage.add(Chunk(0, 0, 3, 84, 100, 0, group_idx=1)) == "chunk 0: tokens [84, 100) outside [85, 100)"
    assert coverage.add(Chunk(0, 0, 2, 0, 100, 0, group_idx=0)) is None
    assert not coverage.is_complete
    assert coverage.add(Chunk(1, 0, 3, 85, 100, 0, group_idx=1)) is None
    assert coverage.is_complete


# ---- ranks ------------------------------------------------------------------------------------------


def test_a_chunk_of_another_group_or_of_other_shards_than_the_links_is_named() -> None:
    planner = ChunkPlanner(MIXED, 1, sender=Rank(0, 2), receiver=Rank(0, 4))
    good = Chunk(0, 0, 1, 0, 10, FRAME_BYTES + 10 * 5, 0, 0, 1)
    assert planner.problem(good) is None
    assert planner.problem(Chunk(0, 0, 1, 0, 10, good.num_bytes, 2, 0, 1)) == "chunk 0: group 2 of 2"
    problem = planner.problem(Chunk(0, 0, 1, 0, 10, good.num_bytes, 0, 0, 2))
    assert problem == "chunk 0: expected shards [0, 1), announced [0, 2)"


@pytest.mark.parametrize(
    ("num_shards", "senders", "receivers"),
    [
        (6, 1, 3),
        (6, 3, 1),
        (4, 4, 2),
        (8, 2, 8),
        (2, 8, 4),
        (2, 1, 8),
        (12, 3, 4),
        (3, 2, 3),
        (3, 2, 2),
        (2, 3, 1),
        (1, 4, 2),
        (0, 1, 3),
        (0, 4, 2),
    ],
)
def test_each_receiver_gets_every_shard_that_it_holds_from_one_sender_that_has_it(
    num_shards: int, senders: int, receivers: int
) -> None:
    """No shards: a plane that each rank holds whole, such as a latent."""
    plane = Plane("p", (num_shards or 1, 2), "int8", is_sharded=num_shards > 0)
    group = KVGroup((0,), (plane,))
    for receiver in (Rank(idx, receivers) for idx in range(receivers)):
        links = {sender: linked_shards(group, Rank(sender, senders), receiver) for sender in range(senders)}
        assert all(set(links[idx]) <= set(group.held(Rank(idx, senders))) for idx in links)
        assert Counter(shard for shards in links.values() for shard in shards) == Counter(group.held(receiver))


def test_no_sender_serves_all_receivers_where_several_hold_the_same() -> None:
    group = KVGroup((0,), (Plane("latent", (8,), "int8"),))
    busy = [sender for r in range(4) for sender in range(2) if linked_shards(group, Rank(sender, 2), Rank(r, 4))]
    assert Counter(busy) == {0: 2, 1: 2}


def test_a_link_between_unequal_widths_is_cut_to_what_both_hold() -> None:
    planner = ChunkPlanner(MIXED, 1, sender=Rank(1, 2), receiver=Rank(0, 1))
    chunks = ChunkCutter(planner, 0, 10).finish()
    assert {(chunk.shard_start, chunk.shard_end) for chunk in chunks} == {(2, 4)}
    assert sum(chunk.num_bytes - FRAME_BYTES for chunk in chunks) == 5 * 10 * 2 * 5
    nothing = ChunkPlanner(MIXED, 1, sender=Rank(1, 2), receiver=Rank(0, 2))
    assert ChunkCutter(nothing, 0, 10).finish() == []
    assert Coverage(nothing, 0, 10).is_complete
