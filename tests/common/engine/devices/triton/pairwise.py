"""All-pairs selection: every pair of values of two axes occurs in some case, in far fewer cases than the product."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> tuple[Case, ...]:
    """Greedy: of some random candidates that hold an uncovered pair, keep the one that covers most."""
    rng = random.Random(seed)
    sizes = {name: len(values) for name, values in axes.items()}
    open_pairs = {
        ((a, i), (b, j)) for a, b in itertools.combinations(sizes, 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    cases = []
    while open_pairs:
        required = dict(min(open_pairs))
        candidates = [{n: required.get(n, rng.randrange(size)) for n, size in sizes.items()} for _ in range(30)]
        best = max(candidates, key=lambda choice: len(_pairs(choice) & open_pairs))
        open_pairs -= _pairs(best)
        cases.append({name: axes[name][idx] for name, idx in best.items()})
    return tuple(cases)


def case_id(case: Case) -> str:
    """Readable test id."""
    return "-".join(f"{name}={value}".replace("torch.", "").replace(" ", "") for name, value in case.items())


def _pairs(choice: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(itertools.combinations(choice.items(), 2))
