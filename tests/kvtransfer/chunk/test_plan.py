"""How KV is cut into chunks, and the check that chunks tile a request."""

import random

import pytest

from kvtransfer.chunk.plan import FRAME_BYTES, MAX_OVER_MIN, ChunkCutter, ChunkPlanner
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
