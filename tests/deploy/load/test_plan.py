"""Arrivals, shared prefixes and traces: what is sent when."""

import itertools
import random
from pathlib import Path

import pytest

from deploy.load.plan import Piece, Shape, bounded, replayed, synthetic
from deploy.load.prompts import Prompts
from deploy.load.traces import InvalidTrace, TraceRow, read_trace

TRACES = Path(__file__).parent / "traces"
MOONCAKE, AZURE = TRACES / "mooncake_sample.jsonl", TRACES / "azure_sample.csv"


def test_arrivals_are_poisson_with_the_rate() -> None:
    plan = synthetic(Shape(8, 4), 20_000, 50.0, random.Random(1))
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(plan)]
    mean = sum(gaps) / len(gaps)
    assert plan[0].at_s == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert sum(gap**2 for gap in gaps) / len(gaps) - mean**2 == pytest.approx(mean**2, rel=0.1)  # std = mean


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert {request.at_s for request in synthetic(Shape(8, 4), 50, float("inf"), random.Random(1))} == {0.0}


def test_the_seed_decides_arrivals_and_prompts() -> None:
    one, same, other = (synthetic(Shape(9, 1, 4, 3), 20, 5.0, random.Random(seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert Prompts(range(50), 1).token_ids(one[0].pieces) != Prompts(range(50), 2).token_ids(one[0].pieces)


def test_shared_prefixes_are_equal_tokens_and_the_rest_differs() -> None:
    plan = synthetic(Shape(40, 4, prefix_len=24, num_prefixes=2), 30, 5.0, random.Random(1))
    prompts = Prompts(range(1000), 7)
    made = [prompts.token_ids(request.pieces) for request in plan]
    assert {len(token_ids) for token_ids in made} == {40}
    assert len({tuple(token_ids[:24]) for token_ids in made}) == 2
    assert len({tuple(token_ids[24:]) for token_ids in made}) == 30


def test_a_prompt_may_be_all_prefix() -> None:
    assert synthetic(Shape(8, 1, prefix_len=8), 1, 1.0, random.Random(1))[0].pieces == (Piece("prefix-0", 8),)


def test_words_are_as_many_as_tokens() -> None:
    assert len(Prompts(range(300), 1).text((Piece("a", 17), Piece("b", 3))).split()) == 20


def test_a_mooncake_trace_keeps_times_lengths_and_sharing() -> None:
    plan = replayed(read_trace(MOONCAKE, "mooncake"))
    prompts = Prompts(range(1000), 1)
    first, second = (prompts.token_ids(request.pieces) for request in plan[:2])
    assert [request.at_s for request in plan[:5]] == [0.0, 0.0, 3.0, 3.0, 5.999]
    assert [request.num_input_tokens for request in plan[:3]] == [2290, 4834, 2012]
    assert [request.max_tokens for request in plan[:3]] == [316, 173, 354]
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]


def test_a_trace_is_played_faster_and_shorter() -> None:
    rows = read_trace(MOONCAKE, "mooncake")
    plan = replayed(rows, time_scale=10.0, length_scale=1 / 64)
    assert plan[-1].at_s == pytest.approx(1.5)
    assert [request.num_input_tokens for request in plan[:2]] == [36, 76]
    assert plan[0].pieces[0] == Piece("block-0", 8)
    assert plan[4].max_tokens == 1  # never none
    assert {request.pieces[0] for request in plan} == {Piece("block-0", 8)}


def test_an_azure_trace_has_seven_digits_of_a_second_and_shares_nothing() -> None:
    plan = replayed(read_trace(AZURE, "azure"))
    assert [round(request.at_s, 4) for request in plan[:3]] == [0.0, 4.3146, 4.5419]
    assert [request.num_input_tokens for request in plan[:3]] == [374, 396, 879]
    assert len({piece.name for request in plan for piece in request.pieces}) == len(plan)


def test_a_trace_without_all_hash_ids_has_a_tail_of_its_own() -> None:
    plan = replayed([TraceRow(5.0, 1000, 3, (7,)), TraceRow(6.0, 100, 0, (7, 8, 9))])
    assert [piece.name for piece in plan[0].pieces] == ["block-7", "request-0"]
    assert plan[1].pieces == (Piece("block-7", 100),)
    assert [request.at_s for request in plan] == [0.0, 1.0]


def test_plans_are_cut_by_count_and_time() -> None:
    plan = replayed(read_trace(MOONCAKE, "mooncake"))
    assert len(bounded(plan, 3, None)) == 3
    assert len(bounded(plan, None, 6.0)) == 5
    assert replayed([]) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 0, "output_length": 1}'),
        ("mooncake", '{"timestamp": 0, "output_length": 1}'),
        ("mooncake", "not json"),
        ("mooncake", '{"timestamp": 0, "input_length": 99999999999, "output_length": 1}'),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1"),
        ("azure", "a,b\n1,2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, kind: str, text: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InvalidTrace, match="request 1: "):
        read_trace(file, kind)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match=r"nothing\.jsonl"):
        read_trace(tmp_path / "nothing.jsonl", "mooncake")
