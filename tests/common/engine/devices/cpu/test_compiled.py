"""Layers in one compiled call against the same layers one operator after another, in bfloat16."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.checkpoint import open_checkpoint
from common.checkpoint.families import layers_of
from common.engine.contract.attention import AttentionBatch
from common.engine.devices.cpu.compiled import compile_layers
from common.engine.devices.cpu.device import CpuDevice
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.weights import open_weights
from tests.caches import attention_spec, fill, planes_of, snapshot
from tests.common.engine.model.batches import Run, batch_of, scattered_runs
from tests.tiny_model import TinyModel, write_tiny_model

MODELS = {
    "llama": TinyModel(),
    "tied": TinyModel(tie_embeddings=True),
    "multi-head": TinyModel(num_kv_heads=4),
    "odd": TinyModel(num_heads=6, num_kv_heads=2, head_dim=24, num_layers=3),
    "as the demo model": TinyModel(num_heads=9, num_kv_heads=3, head_dim=64),
    "wide group": TinyModel(num_heads=5, num_kv_heads=1, head_dim=128),
    "qwen2": TinyModel(architecture="qwen2"),
    "qwen3": TinyModel(architecture="qwen3", head_dim=64),
    "mixtral": TinyModel(architecture="mixtral"),
    "qwen2_moe": TinyModel(architecture="qwen2_moe"),
    "qwen3_moe": TinyModel(architecture="qwen3_moe"),
}
BLOCK_SIZE = 4
# (cached, new) per sequence: single tokens, runs with and without a cached prefix, lengths around 16, 32 and 48
STEPS = {
    "decode": [(0, 1), (3, 1), (15, 1), (16, 1), (49, 1)],
    "prefill": [(0, 2), (0, 33), (0, 47), (0, 49), (17, 31), (40, 5)],
    "mixed": [(20, 1), (0, 40), (16, 1), (8, 7), (33, 1)],
}


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    found = native_ops()
    if found is None or found.products is None:
        pytest.skip("no C++ compiler, or no AVX512-BF16")
    return found


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Side:
    """One way to compute the model, over a cache of its own; all sides' caches start equal."""

    def __init__(self, path: Path, ops: NativeOps | None, dtype: torch.dtype = torch.bfloat16) -> None:
        checkpoint = open_checkpoint(path)
        spec = checkpoint.config
        kv_spec = attention_spec(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, BLOCK_SIZE)
        self.cache = KVCache(kv_spec, (128,))
        generator = torch.Generator().manual_seed(3)
        for plane in planes_of(self.cache):
            plane.copy_(torch.randn(plane.shape, generator=generator) * 0.3)
        self.model: Decoder = build_decoder(spec, open_weights(checkpoint, dtype), CpuDevice(dtype, ops))

    def logits(self, batch: AttentionBatch, rows: torch.Tensor) -> torch.Tensor:
        token_ids = torch.arange(batch.positions.shape[0]) * 7 % 250
        with torch.inference_mode():
            return self.model.forward(token_ids, self.cache.by_layer([batch]), self.cache.layers, rows)


@pytest.fixture(params=MODELS, scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fused")
    write_tiny_model(path, MODELS[request.param])
    return path


def last_rows(batch: AttentionBatch) -> torch.Tensor:
    return (batch.cu_seqlens_q[1:] - 1).long()


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS.keys())
def test_logits_and_kv_are_as_close_to_float32_as_those_of_single_operators(
    ops: NativeOps, threads: None, path: Path, lens: list[tuple[int, int]]
) -> None:
    batch = batch_of(scattered_runs(lens, BLOCK_SIZE, 128), BLOCK_SIZE)
    exact, plain, fused = Side(path, None, torch.float32), Side(path, None), Side(path, ops)
    assert fused.model.compiled_layers == tuple(range(len(fused.cache.layers)))
    expected, single, found = (side.logits(batch, last_rows(batch)) for side in (exact, plain, fused))
    has_experts = any(layer.experts is not None for layer in layers_of(open_checkpoint(path).config))
    error = median_row_error if has_experts else mean_error
    assert error(found, expected) <= 1.5 * error(single, expected) + 1e-3
    kv = [snapshot(side.cache).float() for side in (exact, plain, fused)]
    assert error(kv[2], kv[0]) <= 1.2 * error(kv[1], kv[0])


def mean_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found - expected).abs().mean()


def median_row_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of the rows that have any: a router's near tie may send one through another expert."""
    of_rows = (found - expected).abs().flatten(0, -2).mean(-1)
    return of_rows[of_rows > 0].median()


def test_a_sequence_has_the_same_logits_alone_and_beside_others_on_any_number_of_threads(
    ops: NativeOps, path: Path
) -> None:
    runs = scattered_runs(STEPS["mixed"], BLOCK_SIZE, 128)
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        batch = batch_of(runs, BLOCK_SIZE)
        found.append(Side(path, ops).logits(batch, last_rows(batch)))
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = batch_of([runs[0]], BLOCK_SIZE)
    assert torch.equal(Side(path, ops).logits(alone, last_rows(alone))[0], found[0][0])


def test_each_layers_kv_is_written_when_its_hook_runs_and_no_logits_are_computed_unasked(
    ops: NativeOps, path: Path
) -> None:
    side = Side(path, ops)
    batch = batch_of([Run(0, 6, (1, 2))], BLOCK_SIZE)
    before, written = snapshot(side.cache), []

    def hook(num_layers: int) -> None:
        changed = [not torch.equal(now, then) for now, then in zip(snapshot(side.cache), before, strict=True)]
        written.append(changed.index(False) if False in changed else len(changed))
        assert written[-1] == num_layers

    with torch.inference_mode():
        none = torch.empty(0, dtype=torch.int64)
        logits = side.model.forward(torch.arange(6), side.cache.by_layer([batch]), side.cache.layers, none, hook)
    assert written == list(range(1, len(before) + 1))
    assert logits.shape[0] == 0


def test_several_rows_of_one_sequence_have_their_logits_in_order(ops: NativeOps, path: Path) -> None:
    batch = batch_of([Run(0, 9, (1, 2, 5))], BLOCK_SIZE)
    all_rows = Side(path, ops).logits(batch, torch.arange(9))
    assert torch.equal(Side(path, ops).logits(batch, torch.tensor([2, 7])), all_rows[[2, 7]])


def test_a_prompt_before_leaves_nothing_to_the_next(ops: NativeOps, path: Path) -> None:
    """Room for packed K and V is used again: the first prompt is longer, and all of its are no numbers."""
    short, long = (batch_of(scattered_runs(lens, BLOCK_SIZE, 128), BLOCK_SIZE) for lens in ([(16, 17)], [(90, 47)]))
    expected = Side(path, ops).logits(short, last_rows(short))
    before = Side(path, ops)
    fill(before.cache, float("nan"))
    assert before.logits(long, last_rows(long)).isnan().all()
    assert torch.equal(Side(path, ops).logits(short, last_rows(short)), expected)


def test_a_token_without_a_slot_is_not_written(ops: NativeOps, path: Path) -> None:
    side = Side(path, ops)
    batch = batch_of([Run(0, 3, (7,))], BLOCK_SIZE)
    before = snapshot(side.cache)[:, :, 7, 2]
    batch.slot_mapping[2] = -1
    side.logits(batch, torch.tensor([0]))
    assert torch.equal(snapshot(side.cache)[:, :, 7, 2], before)


@pytest.fixture(params=["first", "middle", "last", "first and last"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[int, ...]]:
    """5 layers, some with a window, which the compiled step does not know; and the numbers of the others.

    No sequence is as long as the window: what is computed is that of the model without.
    """
    unknown = {"first": {0}, "middle": {2}, "last": {4}, "first and last": {0, 4}}[request.param]
    path = write_tiny_model(tmp_path, TinyModel(num_layers=5))
    kinds = ["sliding_attention" if idx in unknown else "full_attention" for idx in range(5)]
    config = json.loads((path / "config.json").read_text()) | {"layer_types": kinds, "sliding_window": 512}
    (path / "config.json").write_text(json.dumps(config))
    return path, tuple(idx for idx in range(5) if idx not in unknown)


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS.keys())
def test_a_layer_of_an_unknown_kind_falls_back_alone_and_all_stay_near_float32(
    ops: NativeOps, mixed: tuple[Path, tuple[int, ...]], lens: list[tuple[int, int]]
) -> None:
    path, known = mixed
    batch = batch_of(scattered_runs(lens, BLOCK_SIZE, 128), BLOCK_SIZE)
    exact, plain, compiled = Side(path, None, torch.float32), Side(path, None), Side(path, ops)
    assert (plain.model.compiled_layers, compiled.model.compiled_layers) == ((), known)
    expected, single, found = (side.logits(batch, last_rows(batch)) for side in (exact, plain, compiled))
    assert mean_error(found, expected) <= 1.5 * mean_error(single, expected) + 1e-3
    kv = [snapshot(side.cache).float() for side in (exact, plain, compiled)]
    assert mean_error(kv[2], kv[0]) <= 1.2 * mean_error(kv[1], kv[0])


def test_a_mixed_stack_calls_each_layers_hook_in_order_and_gives_logits_only_when_asked(
    ops: NativeOps, mixed: tuple[Path, tuple[int, ...]]
) -> None:
    side, heard = Side(mixed[0], ops), list[int]()
    batch = batch_of([Run(0, 6, (1, 2))], BLOCK_SIZE)
    with torch.inference_mode():
        none = torch.empty(0, dtype=torch.int64)
        batches = side.cache.by_layer([batch])
        logits = side.model.forward(torch.arange(6), batches, side.cache.layers, none, heard.append)
    assert heard == [1, 2, 3, 4, 5]
    assert logits.shape == (0, TinyModel().vocab_size)
    every = side.logits(batch, torch.arange(6))
    assert torch.equal(side.logits(batch, torch.tensor([2, 5])), every[[2, 5]])


def test_a_run_cut_in_two_gives_the_same_bits_as_one(ops: NativeOps, tmp_path: Path) -> None:
    """Layers 0 to 3 in one call, and in two: what lies between two runs is rounded as within one."""
    path = write_tiny_model(tmp_path, TinyModel(num_layers=4))
    batch = batch_of(scattered_runs(STEPS["mixed"], BLOCK_SIZE, 128), BLOCK_SIZE)
    whole, cut = Side(path, ops), Side(path, ops)
    layers, tail = cut.model._layers, cut.model._tail
    first = compile_layers(layers[:2], replace(tail, head=replace(tail.head, packed=None)), ops.products)
    second = compile_layers(layers[2:], tail, ops.products)
    cut.model._compiled = {0: first[0], 2: second[0]}
    assert cut.model.compiled_layers == (0, 1, 2, 3)
    assert torch.equal(cut.logits(batch, last_rows(batch)), whole.logits(batch, last_rows(batch)))
    assert torch.equal(snapshot(cut.cache), snapshot(whole.cache))
