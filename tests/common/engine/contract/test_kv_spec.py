"""Sizes of what a token leaves behind follow from its planes."""

import pytest
import torch

from common.engine.contract.kv_spec import BYTES_PER_ELEMENT, KVGroup, KVSpec, Plane

KEY = Plane("k", (2, 16), "bfloat16", is_sharded=True)
VALUE = Plane("v", (2, 8), "int8", is_sharded=True)
LATENT = Plane("latent", (576,), "int8")


@pytest.mark.parametrize(("name", "num_bytes"), BYTES_PER_ELEMENT.items())
def test_the_bytes_of_an_element_are_those_of_torch(name: str, num_bytes: int) -> None:
    assert getattr(torch, name).itemsize == num_bytes


def test_a_row_is_one_token_of_a_plane() -> None:
    assert KEY.row_bytes == 2 * 16 * 2
    assert LATENT.row_bytes == 576


def test_a_block_holds_all_planes_of_all_layers_of_every_group() -> None:
    full = KVGroup((0, 2), (KEY, VALUE))
    windowed = KVGroup((1,), (LATENT,), window=8)
    spec = KVSpec(4, (full, windowed))
    assert full.bytes_per_token_layer == 64 + 16
    assert full.bytes_per_token == 2 * (64 + 16)
    assert spec.num_layers == 3
    assert spec.bytes_per_token == 2 * (64 + 16) + 576
    assert spec.bytes_per_block == 4 * spec.bytes_per_token


def test_planes_of_a_group_split_alike() -> None:
    assert (KVGroup((0,), (KEY, VALUE)).num_shards, KVGroup((0,), (LATENT,)).num_shards) == (2, 1)
    with pytest.raises(AssertionError, match="split differently"):
        KVGroup((0,), (KEY, LATENT))


@pytest.mark.parametrize(("num_tokens", "first"), [(3, 0), (8, 1), (9, 2), (100, 93)])
def test_of_a_window_the_next_token_reads_one_token_less_before_it(num_tokens: int, first: int) -> None:
    """The next token sees itself and the window - 1 tokens before it."""
    assert KVGroup((0,), (KEY,), window=8).first_token_needed(num_tokens) == first
    assert KVGroup((0,), (KEY,)).first_token_needed(num_tokens) == 0


def test_a_group_is_described_by_all_that_two_workers_must_have_in_common() -> None:
    group = KVGroup((0, 1, 2, 5, 7, 8), (KEY, VALUE), window=8)
    assert str(group) == "layers 0-2 5 7-8 window 8: k 2x16 bfloat16, v 2x8 int8"
