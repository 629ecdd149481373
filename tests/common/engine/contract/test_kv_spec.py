"""Sizes of what a token leaves behind follow from its planes."""

import pytest
import torch

from common.engine.contract.kv_spec import BYTES_PER_ELEMENT, KVGroup, KVSpec, Plane

KEY = Plane("k", (2, 16), "bfloat16", shard=0)
LATENT = Plane("latent", (576,), "int8")


@pytest.mark.parametrize(("name", "num_bytes"), BYTES_PER_ELEMENT.items())
def test_the_bytes_of_an_element_are_those_of_torch(name: str, num_bytes: int) -> None:
    assert getattr(torch, name).itemsize == num_bytes


def test_a_row_is_one_token_of_a_plane() -> None:
    assert KEY.row_bytes == 2 * 16 * 2
    assert LATENT.row_bytes == 576


def test_a_block_holds_all_planes_of_all_layers_of_every_group() -> None:
    full = KVGroup((0, 2), (KEY, LATENT))
    windowed = KVGroup((1,), (KEY,), window=8)
    spec = KVSpec(4, (full, windowed))
    assert full.bytes_per_token_layer == 64 + 576
    assert full.bytes_per_token == 2 * (64 + 576)
    assert spec.num_layers == 3
    assert spec.bytes_per_token == 2 * (64 + 576) + 64
    assert spec.bytes_per_block == 4 * spec.bytes_per_token
