"""min_p, top_k, top_p against the definitions, token by token."""

import math
from itertools import product

import pytest
import torch

from common.engine.sampling.filters import apply_filters
from common.values.request import SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBABILITIES.log()


def kept(logits: torch.Tensor, **fields: float) -> list[int]:
    params = SamplingParams(seed=0, max_tokens=1, **fields)  # type: ignore[arg-type]
    left, token_ids = apply_filters((logits, torch.arange(len(logits))), params)
    assert torch.equal(left, logits[token_ids])
    return sorted(token_ids.tolist())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 10**9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.9}, [1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.4 / 0.65 reaches 0.6 once top_k has cut
        ({"min_p": 0.3, "top_k": 2}, [1, 3]),
    ],
    ids=str,
)
def test_filters_keep_what_their_definitions_say(fields: dict[str, float], expected: list[int]) -> None:
    assert kept(LOGITS, **fields) == expected


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    tied = torch.tensor([1.0, 3.0, 1.0, 1.0])
    assert kept(tied, top_k=2) == [0, 1, 2, 3]
    assert kept(tied, top_p=0.9) == [0, 1, 2, 3]


def test_a_tiny_top_p_on_an_even_row_keeps_its_ties() -> None:
    assert kept(torch.zeros(16), top_p=1e-12) == list(range(16))


def test_an_inflated_scale_does_not_matter() -> None:
    assert kept(LOGITS + 50.0, top_p=0.41) == [1, 3]
    assert kept(LOGITS - 50.0, min_p=0.3) == [1, 3, 4]


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_top_p_agrees_with_a_full_sort_on_flat_and_peaked_rows(scale: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * scale
    for top_p, top_k in product((0.1, 0.5, 0.95, 0.999), (0, 2000)):
        order = logits.double().sort(descending=True)
        num_left = top_k or 5000
        probabilities = order.values[:num_left].softmax(0)
        before = probabilities.cumsum(0) - probabilities
        expected = int((before < top_p).sum())
        found = len(kept(logits, top_p=top_p, top_k=top_k))
        assert math.isclose(found, expected, abs_tol=2), (top_p, top_k)  # float32 sums of 5000 terms
