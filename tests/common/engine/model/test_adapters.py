"""Adapters beside the base weights against the same model with their changes merged in, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.adapters import open_adapter
from common.engine.loading import LoadedModel
from common.values.request import Adapter, SamplingParams
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.common.engine.executor.test_runner import BLOCK_SIZE, GREEDY, PROMPTS, SEEDED, load
from tests.interpreter import import_triton_interpreted
from tests.one_process import generate
from tests.tiny_adapter import TinyAdapter, write_adapter, write_merged
from tests.tiny_model import FAMILIES, TinyModel, write_tiny_model

import_triton_interpreted()

# Of different ranks, and of different parts: nothing of one may reach the rows of another.
ADAPTERS = [
    TinyAdapter(seed=1),
    TinyAdapter(rank=7, alpha=3.5, seed=2, targets=("q_proj", "v_proj", "up_proj"), fields={"use_rslora": True}),
    TinyAdapter(rank=2, seed=3, targets=("o_proj", "down_proj"), ranks={"down_proj": 5}),
]


def add(loaded: LoadedModel, path: Path) -> str:
    """Load the adapter; its digest."""
    adapter = adapter_at(path, loaded)
    loaded.adapters.add(adapter.digest, loaded.adapters.load(adapter))
    return adapter.digest


def adapter_at(path: Path, loaded: LoadedModel) -> Adapter:
    return Adapter(open_adapter(path, loaded.spec).digest, str(path))


def generations(params: SamplingParams, adapters: list[str]) -> list[Generation]:
    tables = blocks_for([len(prompt) + params.max_tokens for prompt in PROMPTS], BLOCK_SIZE, 64)
    rows = zip(PROMPTS, tables, adapters, strict=True)
    return [Generation(prompt, params, table, adapter=adapter) for prompt, table, adapter in rows]


def write_all(tmp_path: Path, model: TinyModel) -> tuple[Path, list[Path], list[Path]]:
    """The model, the adapters, and the model with each merged in."""
    base = write_tiny_model(tmp_path / "base", model)
    adapters = [write_adapter(tmp_path / f"a{idx}", base, each) for idx, each in enumerate(ADAPTERS)]
    return base, adapters, [write_merged(tmp_path / f"m{idx}", base, path) for idx, path in enumerate(adapters)]


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_of_several_adapters_and_none_equals_the_merged_models(
    tmp_path: Path, params: SamplingParams, chunk: int
) -> None:
    base, adapters, merged = write_all(tmp_path, TinyModel())
    loaded = load(base)
    digests = [add(loaded, path) for path in adapters]
    batch = generations(params, [digests[0], "", digests[1], digests[2], digests[0]])
    run_all(loaded.runner, batch, chunk)
    models = [merged[0], base, merged[1], merged[2], merged[0]]
    expected = [generate(path, each.prompt, params)[0] for path, each in zip(models, batch, strict=True)]
    assert [each.output for each in batch] == expected
    assert expected != [generate(base, each.prompt, params)[0] for each in batch], "the adapters change nothing"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "olmo2"])
def test_other_architectures_equal_the_merged_models(tmp_path: Path, architecture: str) -> None:
    base, adapters, merged = write_all(tmp_path, replace(FAMILIES[architecture]))
    loaded = load(base)
    batch = generations(GREEDY, [add(loaded, adapters[0]), "", "", "", add(loaded, adapters[1])])
    run_all(loaded.runner, batch, 7)
    for each, path in zip(batch, [merged[0], base, base, base, merged[1]], strict=True):
        assert [each.output] == generate(path, each.prompt, GREEDY)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gemma3", ADAPTERS[0].targets),
        ("qwen3_moe", ("q_proj", "k_proj", "o_proj")),
    ],
)
def test_fused_weights_windows_and_attention_of_mixtures_equal_the_merged_model(
    tmp_path: Path, architecture: str, targets: tuple[str, ...]
) -> None:
    """The oracle knows neither fused weights nor windows: the same engine with merged weights is compared."""
    base = write_tiny_model(tmp_path / "base", FAMILIES[architecture])
    path = write_adapter(tmp_path / "a", base, TinyAdapter(targets=targets, seed=4))
    scored = replace(GREEDY, num_logprobs=2)
    loaded, merged = load(base), load(write_merged(tmp_path / "merged", base, path))
    digest, num_groups = add(loaded, path), len(loaded.cache.spec.groups)
    outputs, logprobs = [], []
    for model, adapter in ((loaded, digest), (merged, ""), (loaded, "")):
        batch = [replace(each, num_groups=num_groups) for each in generations(scored, [adapter] * len(PROMPTS))]
        run_all(model.runner, batch, 7)
        outputs.append([each.output for each in batch])
        logprobs.append([token.top[1][1] for each in batch for token in each.tokens])  # of the second best
    assert outputs[0] == outputs[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert logprobs[0] != pytest.approx(logprobs[2], abs=1e-2)


def test_the_triton_device_equals_the_merged_model(tmp_path: Path) -> None:
    base, adapters, merged = write_all(tmp_path, TinyModel())
    loaded, params = load(base, attention="triton"), replace(GREEDY, max_tokens=3)
    batch = generations(params, [add(loaded, adapters[0]), "", "", "", add(loaded, adapters[1])])[:2]
    run_all(loaded.runner, batch, 20)
    assert [[each.output] for each in batch] == [
        generate(path, each.prompt, params) for path, each in zip([merged[0], base], batch, strict=True)
    ]


def test_files_that_changed_since_are_refused(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base")
    path, loaded = write_adapter(tmp_path / "a", base), load(base)
    adapter = adapter_at(path, loaded)
    write_adapter(path, base, TinyAdapter(seed=9))
    with pytest.raises(CheckpointError, match=f"expected {adapter.digest[:12]}"):
        loaded.adapters.load(adapter)


def test_an_adapter_of_another_model_is_refused_by_its_tensor(tmp_path: Path) -> None:
    base, other = write_tiny_model(tmp_path / "b"), write_tiny_model(tmp_path / "o", TinyModel(intermediate_size=96))
    path = write_adapter(tmp_path / "a", other)
    wanted: Any = open_adapter(path, open_checkpoint(other).config)
    with pytest.raises(CheckpointError, match=r"tensor base_model\.model\.model\.layers\.0\.mlp\.\w+\.lora_"):
        load(base).adapters.load(Adapter(wanted.digest, str(path)))
