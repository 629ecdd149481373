"""Chunks from and to the caches of several ranks: widths need not be equal."""

from itertools import product

import pytest
import torch

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.engine.kv.attention_planes import attention_planes
from common.engine.kv.cache import KVCache
from common.engine.kv.sharded import KVShards, new_shards
from common.values.ranks import ranks_of
from kvtransfer.chunk.pack import kv_packer
from kvtransfer.events import Chunk
from tests.caches import planes_of

NUM_HEADS, NUM_LAYERS, NUM_TOKENS = 3, 3, 11
SPECS = {
    "heads": KVSpec(4, (KVGroup(tuple(range(NUM_LAYERS)), attention_planes(NUM_HEADS, 6, torch.bfloat16)),)),
    "codes": KVSpec(4, (KVGroup(tuple(range(NUM_LAYERS)), attention_planes(NUM_HEADS, 16, torch.int8)),)),
    "latent": KVSpec(4, (KVGroup(tuple(range(NUM_LAYERS)), (Plane("latent", (10,), "float32"),)),)),
}
TABLE, OTHER_TABLE = (5, 0, 3), (1, 2, 6)


def cache_of(spec: KVSpec, width: int) -> KVShards:
    shards, _ = new_shards(spec, (7,), ranks_of(width))
    return shards


def whole(spec: KVSpec, fill: bool) -> KVCache:
    cache = KVCache(spec, (7,))
    for idx, plane in enumerate(planes_of(cache)):
        data = plane.view(torch.uint8)
        data.copy_(
            torch.randint(256, data.shape, generator=torch.Generator().manual_seed(idx))
        ) if fill else data.zero_()
    return cache


def chunk_of(spec: KVSpec, tokens: tuple[int, int] = (1, NUM_TOKENS)) -> Chunk:
    (group,) = spec.groups
    num_bytes = 2 * (tokens[1] - tokens[0]) * group.bytes_per_token_layer
    return Chunk(0, 1, NUM_LAYERS, *tokens, num_bytes, 0, 0, group.num_shards)


def moved(source: KVCache | KVShards, target: KVCache | KVShards, tables: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """The bytes between them."""
    chunk = chunk_of(source.spec)
    data = torch.empty(chunk.num_bytes, dtype=torch.uint8)
    kv_packer(source).gather(chunk, tables[0], data)
    kv_packer(target).scatter(chunk, tables[1], data)
    return data


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("sender", "receiver"), [*product((1, 2, 3), (1, 2, 3)), (5, 2), (2, 5)])
def test_what_crosses_does_not_depend_on_either_width(name: str, sender: int, receiver: int) -> None:
    spec = SPECS[name]
    source, target, ranks = whole(spec, fill=True), whole(spec, fill=False), cache_of(spec, sender)
    moved(source, ranks, (TABLE, TABLE))
    others = cache_of(spec, receiver)
    data = moved(ranks, others, (TABLE, OTHER_TABLE))
    assert torch.equal(data, moved(source, target, (TABLE, OTHER_TABLE)))
    back = whole(spec, fill=False)
    moved(others, back, (OTHER_TABLE, OTHER_TABLE))
    for ours, expected in zip(planes_of(back), planes_of(target), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def test_every_rank_that_holds_a_head_gets_it() -> None:
    spec = SPECS["heads"]
    source, ranks = whole(spec, fill=True), cache_of(spec, 5)
    moved(source, ranks, (TABLE, TABLE))
    for rank, cache in zip(ranks_of(5), ranks.caches, strict=True):
        held = spec.groups[0].held(rank)
        for part, all_heads in zip(planes_of(cache), planes_of(source), strict=True):
            rows = all_heads[1:, TABLE[1], :, held.start : held.stop]
            assert torch.equal(part[1:, TABLE[1]].view(torch.uint8), rows.contiguous().view(torch.uint8))


def test_memory_that_was_given_back_reads_as_zeros() -> None:
    ranks = cache_of(SPECS["heads"], 2)
    moved(whole(SPECS["heads"], fill=True), ranks, (TABLE, TABLE))
    (plane, *_) = planes_of(ranks.caches[1])
    assert plane.view(torch.uint8).any()
    ranks.free()
    assert not plane[:, 0].view(torch.uint8).any()
