"""A model split over ranks gives the logits of the whole one, and each rank reads its part alone."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from common.checkpoint import CheckpointError, ModelSpec, open_checkpoint
from common.checkpoint.families import layers_of
from common.engine.contract.collectives import Collectives
from common.engine.devices.cpu.device import CpuDevice
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.sharding import Cut, check_split, cuts_of, layer_of_rank
from common.engine.model.weights import load_tensors, open_weights
from common.values.ranks import Rank, ranks_of
from tests.caches import kv_spec_in_one_group
from tests.common.engine.model.test_architectures import TOKENS, forward_in_chunks, load
from tests.ranks import new_collectives, on_ranks
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import FAMILIES, TinyModel, write_tiny_model

NINE_HEADS = TinyModel(num_heads=9, num_kv_heads=3)
# (model, ranks): KV heads that divide, that do not, that are held by several ranks; query heads that do not divide.
SPLITS = {
    "two each": (TinyModel(), 2),
    "demo's heads by 3": (NINE_HEADS, 3),
    "demo's heads by 2": (NINE_HEADS, 2),
    "one KV head by 2": (TinyModel(num_heads=4, num_kv_heads=1), 2),
    "one KV head by 3": (TinyModel(num_heads=4, num_kv_heads=1), 3),
    "two KV heads by 3": (TinyModel(num_heads=8), 3),
    "tied": (TinyModel(tie_embeddings=True), 2),
    "qwen2": (TinyModel(architecture="qwen2"), 2),
    "qwen3": (TinyModel(architecture="qwen3", num_layers=3), 2),
    "gemma3": (TinyModel(architecture="gemma3", num_layers=3, tie_embeddings=True), 2),
    "gemma3 with one KV head": (TinyModel(architecture="gemma3", num_layers=3, num_kv_heads=1), 2),
    "mixtral": (TinyModel(architecture="mixtral"), 2),
    "qwen2_moe": (TinyModel(architecture="qwen2_moe"), 2),
    "latents": (FAMILIES["deepseek_v2"], 2),
    "latents and queries of a rank, by 3": (FAMILIES["deepseek_v3"], 3),
    "small MLP": (TinyModel(intermediate_size=36), 2),
}


def load_rank(path: Path, collectives: Collectives) -> tuple[Decoder, KVCache]:
    checkpoint = open_checkpoint(path)
    spec, rank = checkpoint.config, collectives.rank
    kv_spec = kv_spec_in_one_group(spec, torch.float32, block_size=4)
    weights = open_weights(checkpoint, torch.float32, cuts=cuts_of(spec, rank))
    decoder = build_decoder(spec, weights, CpuDevice(torch.float32, None), collectives)
    return decoder, KVCache(kv_spec.of_rank(rank), (8,))


def split_logits(path: Path, num_ranks: int, chunks: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = on_ranks(new_collectives(num_ranks), lambda own: forward_in_chunks(*load_rank(path, own), chunks))
    return logits[0]


@pytest.mark.parametrize("chunks", [[20], [8, 1, 11]], ids=str)
@pytest.mark.parametrize("name", SPLITS)
def test_logits_of_ranks_equal_those_of_the_whole_model(tmp_path: Path, name: str, chunks: list[int]) -> None:
    model, num_ranks = SPLITS[name]
    path = write_tiny_model(tmp_path / "m", model)
    found = split_logits(path, num_ranks, chunks)
    torch.testing.assert_close(found, forward_in_chunks(*load(path), chunks), atol=1e-4, rtol=1e-4)
    assert found.shape == (len(TOKENS), model.vocab_size)


@pytest.mark.parametrize("quant", [None, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0], ids=str)
def test_ranks_of_a_gguf_file_equal_the_whole_file(tmp_path: Path, quant: gguf.GGMLQuantizationType | None) -> None:
    path = write_tiny_model(tmp_path / "m", replace(NINE_HEADS, head_dim=32, hidden_size=96))
    converted = write_tiny_gguf(path, tmp_path / "m.gguf", quant)
    whole = split_logits(converted, 1, [20])
    torch.testing.assert_close(split_logits(converted, 2, [20]), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", [None, gguf.GGMLQuantizationType.Q8_0], ids=str)
def test_the_parts_that_ranks_read_are_the_whole_weights(
    tmp_path: Path, quant: gguf.GGMLQuantizationType | None
) -> None:
    """Of KV heads that no two ranks share. The output's inputs are cut inside a block of 32."""
    model = TinyModel(num_heads=6)
    path = write_tiny_gguf(write_tiny_model(tmp_path / "m", model), tmp_path / "m.gguf", quant)
    checkpoint = open_checkpoint(path)
    cuts = [cuts_of(checkpoint.config, rank) for rank in ranks_of(2)]
    for name, tensor in load_tensors(checkpoint, torch.float32):
        if name in cuts[0]:
            parts = [read(path, name, of_rank[name], tensor.shape) for of_rank in cuts]
            assert torch.equal(torch.cat(parts, cuts[0][name].axis), tensor), name


def read(path: Path, name: str, cut: Cut, shape: torch.Size) -> torch.Tensor:
    sizes = [cut.size if axis == cut.axis else size for axis, size in enumerate(shape)]
    return open_weights(open_checkpoint(path), torch.float32, cuts={name: cut}).take(name, tuple(sizes))


def test_a_rank_holds_its_share_of_what_is_split(tmp_path: Path) -> None:
    spec = open_checkpoint(write_tiny_model(tmp_path / "m", NINE_HEADS)).config
    (layer, *_) = layers_of(spec)
    parts = [layer_of_rank(layer, rank) for rank in ranks_of(2)]
    assert [(part.num_heads, part.num_kv_heads, part.intermediate_size) for part in parts] == [(3, 1, 64), (6, 2, 64)]


def test_a_model_in_one_process_is_cut_nowhere(tmp_path: Path) -> None:
    spec = open_checkpoint(write_tiny_model(tmp_path / "m")).config
    assert cuts_of(spec, Rank(0, 1)) == {}
    assert [layer_of_rank(layer, Rank(0, 1)) for layer in layers_of(spec)] == list(layers_of(spec))


def test_a_split_that_cannot_be_is_refused_with_its_reason(tmp_path: Path) -> None:
    def spec_of(model: TinyModel) -> ModelSpec:
        return open_checkpoint(write_tiny_model(tmp_path / f"m{model.num_heads}{model.architecture}", model)).config

    with pytest.raises(CheckpointError, match="4 query heads are too few for 5 ranks"):
        check_split(spec_of(TinyModel()), 5)
    with pytest.raises(CheckpointError, match="normalized over all heads"):
        check_split(spec_of(TinyModel(architecture="olmo2")), 2)
    check_split(spec_of(TinyModel()), 4)
