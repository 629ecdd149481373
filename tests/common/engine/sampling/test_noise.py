"""The hashed noise: a pure function, spread like Gumbel noise."""

import itertools
import math

import pytest
import torch

from common.engine.sampling.noise import gumbel, hash_bits, row_key

VOCAB = torch.arange(50_000, dtype=torch.int32)
MASK32 = 0xFFFFFFFF


def hash_in_python(seed: int, choice_idx: int, position: int, token_id: int) -> int:
    """The same hash on Python's unbounded integers."""
    key = row_key(seed, choice_idx, position)
    x = (token_id * 0x9E3779B1 + (key & MASK32)) & MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x ^= key >> 32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@pytest.mark.parametrize("draw", [(0, 0, 0), (7, 3, 11), (2**63 + 5, 1, 99_999), (-4, 0, 1)], ids=str)
def test_tensor_arithmetic_equals_unbounded_integers(draw: tuple[int, int, int]) -> None:
    token_ids = torch.tensor([0, 1, 2, 48_123, 2**31 - 1], dtype=torch.int32)
    bits = [value & MASK32 for value in hash_bits(*draw, token_ids).tolist()]
    assert bits == [hash_in_python(*draw, token_id) for token_id in token_ids.tolist()]


def test_the_values_never_change_between_releases() -> None:
    """A replay by a newer worker must draw what the older one drew."""
    bits = hash_bits(1234, 0, 0, torch.arange(4, dtype=torch.int32))
    assert bits.tolist() == [1770823983, -634342700, 264610273, -1455424602]


def test_a_tokens_noise_does_not_depend_on_which_others_are_asked() -> None:
    some = torch.tensor([5, 49_000, 17], dtype=torch.int32)
    assert torch.equal(gumbel(1, 2, 3, some), gumbel(1, 2, 3, VOCAB)[some.long()])


def test_seed_choice_and_position_each_change_the_draw() -> None:
    draws = {(seed, choice, position) for seed, choice, position in itertools.product((0, 1, 2), repeat=3)}
    keys = {row_key(*draw) for draw in draws}
    assert len(keys) == len(draws)
    best = [int(gumbel(*draw, VOCAB).argmax()) for draw in draws]
    assert len(set(best)) > 24  # 27 draws out of 50000 hardly ever meet


def test_noise_has_gumbels_mean_spread_and_is_finite() -> None:
    noise = torch.cat([gumbel(seed, 0, 0, VOCAB) for seed in range(20)])
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.01


def test_neighbouring_tokens_positions_and_choices_are_uncorrelated() -> None:
    base = gumbel(1, 0, 0, VOCAB)
    others = [base.roll(1), gumbel(1, 0, 1, VOCAB), gumbel(1, 1, 0, VOCAB), gumbel(2, 0, 0, VOCAB)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 0.02
