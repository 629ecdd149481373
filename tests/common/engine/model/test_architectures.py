"""Each architecture through the paged model against the plain reference in `tests.reference_model`."""

import json
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch

from common.checkpoint import CheckpointError, open_checkpoint
from common.engine.devices.cpu.device import CpuDevice
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.sharding import Cut
from common.engine.model.weights import Weights, load_tensors, open_weights
from tests.caches import fill, kv_spec_in_one_group, snapshot
from tests.common.engine.model.batches import Run, batch_of
from tests.reference_model import FAMILIES as REFERENCE_FAMILIES
from tests.reference_model import ReferenceModel, load_reference
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import FAMILIES, TinyModel, write_tiny_model

TOKENS = [5, 77, 130, 9, 200, 41, 41, 270, 3, 18, 99, 64, 250, 7, 7, 7, 161, 12, 33, 88]
BLOCKS = (3, 1, 6, 0, 5)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {name: FAMILIES[name] for name in REFERENCE_FAMILIES} | {
    "tied": TinyModel(tie_embeddings=True),
    "multi-head": TinyModel(num_kv_heads=4),
    "odd": TinyModel(num_heads=6, num_kv_heads=2, head_dim=24, num_layers=3),
}


def load(
    path: Path, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> tuple[Decoder, KVCache]:
    checkpoint = open_checkpoint(path)
    spec = checkpoint.config
    cache = KVCache(kv_spec_in_one_group(spec, kv_dtype or dtype, block_size=4), (8,))
    return build_decoder(spec, open_weights(checkpoint, dtype), CpuDevice(dtype, None)), cache


def forward_in_chunks(model: Decoder, cache: KVCache, chunks: list[int]) -> torch.Tensor:
    """Logits of every token of TOKENS, computed chunk by chunk over the paged cache."""
    logits, start = [], 0
    for num_new in chunks:
        token_ids = torch.tensor(TOKENS[start : start + num_new])
        batch = batch_of([Run(start, num_new, BLOCKS)], cache.block_size)
        logits.append(model.forward(token_ids, cache.by_layer([batch]), cache.layers, torch.arange(num_new)))
        start += num_new
    return torch.cat(logits)


def reference_logits(reference: ReferenceModel) -> torch.Tensor:
    return reference.forward(TOKENS, reference.new_past())


@pytest.mark.parametrize("chunks", [[20], [7, 13], [8, 1, 1, 10], [1] * 20], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_reference_however_the_prompt_is_cut(tmp_path: Path, name: str, chunks: list[int]) -> None:
    path = write_tiny_model(tmp_path / "m", MODELS[name])
    logits = forward_in_chunks(*load(path), chunks)
    torch.testing.assert_close(logits, reference_logits(load_reference(path)), atol=1e-4, rtol=1e-4)


def test_llama3_scaling_equals_the_reference_and_matters(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    unscaled = forward_in_chunks(*load(path), [20])
    config = json.loads((path / "config.json").read_text()) | {"rope_scaling": LLAMA3}
    (path / "config.json").write_text(json.dumps(config))
    scaled = forward_in_chunks(*load(path), [20])
    torch.testing.assert_close(scaled, reference_logits(load_reference(path)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scaled, unscaled, atol=1e-2)


@pytest.mark.parametrize("chunks", [[20], [7, 13], [8, 1, 1, 10]], ids=str)
def test_windows_and_soft_cap_equal_the_reference_and_matter(tmp_path: Path, chunks: list[int]) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(num_layers=3))
    plain = forward_in_chunks(*load(path), chunks)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    change = {"layer_types": kinds, "sliding_window": 5, "attn_logit_softcapping": 2.0}
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    logits = forward_in_chunks(*load(path), chunks)
    torch.testing.assert_close(logits, reference_logits(load_reference(path)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits, plain, atol=1e-2)


@pytest.mark.parametrize(("kind", "bound"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.08)], ids=str)
def test_a_quantized_cache_stays_near_float32(tmp_path: Path, kind: torch.dtype, bound: float) -> None:
    """Mean error of the logits as a part of their spread; a code is off by 1/254 (INT8), 1/16 (FP8)."""
    path = write_tiny_model(tmp_path / "m")
    exact = forward_in_chunks(*load(path), [20])
    rounded = forward_in_chunks(*load(path, kv_dtype=kind), [8, 1, 1, 10])
    error = (exact - rounded).abs().mean() / exact.std()
    assert 0 < error < bound


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    exact, rounded = (forward_in_chunks(*load(path, dtype), [20]) for dtype in (torch.float32, torch.bfloat16))
    assert (exact - rounded).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "olmo2"])
def test_a_gguf_file_gives_the_logits_of_the_directory_it_came_from(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    converted = write_tiny_gguf(path, tmp_path / "m.gguf")
    expected = reference_logits(load_reference(path))
    torch.testing.assert_close(forward_in_chunks(*load(converted), [20]), expected, atol=1e-4, rtol=1e-4)


def test_quantized_weights_are_those_that_the_gguf_library_gives(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    converted = write_tiny_gguf(path, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    original = dict(load_tensors(open_checkpoint(path), torch.float32))
    quantized = dict(load_tensors(open_checkpoint(converted), torch.float32))
    assert original.keys() == quantized.keys()
    for name, tensor in original.items():
        assert (tensor - quantized[name]).abs().max() <= tensor.abs().max() / 127, name


def test_the_hook_follows_each_layers_kv_and_precedes_the_logits(tmp_path: Path) -> None:
    """When hook(n) runs, layer n - 1 holds every token's KV and layer n none."""
    model, cache = load(write_tiny_model(tmp_path / "m", TinyModel(num_layers=3)))
    fill(cache, 0.0)
    seen: list[tuple[int, list[bool]]] = []

    def hook(num_layers: int) -> None:
        seen.append((num_layers, [bool(layer[0][list(BLOCKS)].flatten(0, 1)[:20].any()) for layer in cache.layers]))

    batch = batch_of([Run(0, 20, BLOCKS)], cache.block_size)
    model.forward(torch.tensor(TOKENS), cache.by_layer([batch]), cache.layers, torch.tensor([19]), hook)
    assert seen == [(1, [True, False, False]), (2, [True, True, False]), (3, [True, True, True])]


def test_a_chunk_without_wanted_rows_writes_the_same_kv(tmp_path: Path) -> None:
    model, cache = load(write_tiny_model(tmp_path / "m"))
    batch = batch_of([Run(0, 20, BLOCKS)], cache.block_size)
    model.forward(torch.tensor(TOKENS), cache.by_layer([batch]), cache.layers, torch.arange(20))
    written = snapshot(cache)
    fill(cache, 0.0)
    logits = model.forward(
        torch.tensor(TOKENS), cache.by_layer([batch]), cache.layers, torch.tensor([], dtype=torch.int64)
    )
    assert logits.shape == (0, TinyModel().vocab_size)
    slots = Run(0, 20, BLOCKS).slots(4)
    ours, other = (data.flatten(2, 3)[:, :, slots] for data in (snapshot(cache), written))
    torch.testing.assert_close(ours, other)


def _whole(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return tensor.clone()


def test_a_missing_a_surplus_and_a_misshapen_weight_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "m"))
    tensors = dict(load_tensors(checkpoint, torch.float32))

    def build(changed: dict[str, torch.Tensor]) -> None:
        loaders = {name: partial(_whole, tensor) for name, tensor in changed.items()}
        weights = Weights(loaders, torch.float32)
        build_decoder(checkpoint.config, weights, CpuDevice(torch.float32, None))

    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=name):
        build({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=r"expected shape \(128, 64\), got \(3, 64\)"):
        build(tensors | {name: torch.zeros(3, 64)})
    with pytest.raises(CheckpointError, match="surplus"):
        build(tensors | {"surplus.bias": torch.zeros(1)})
