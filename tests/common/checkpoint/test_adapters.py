"""What is read of a LoRA adapter, and what is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.adapters import open_adapter
from tests.tiny_adapter import PROJECTIONS, TinyAdapter, write_adapter
from tests.tiny_model import TinyModel, write_tiny_model

Q_DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """By name; None = without it."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_every_projection_of_every_layer_is_found(model: Path, tmp_path: Path) -> None:
    files = open_adapter(write_adapter(tmp_path / "a", model), open_checkpoint(model).config)
    assert {(each.layer, each.part) for each in files.parts} == {
        (layer, part) for layer in range(2) for part in ("q", "k", "v", "output", "gate", "up", "down")
    }
    assert {each.scale for each in files.parts} == {2.0}
    shapes = {each.part: (each.down.shape, each.up.shape) for each in files.parts}
    assert shapes["k"] == ((4, 64), (32, 4))


def test_scales_follow_rank_alpha_and_their_patterns(model: Path, tmp_path: Path) -> None:
    fields = {"use_rslora": True, "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 3}}
    adapter = TinyAdapter(rank=4, alpha=6, ranks={"q_proj": 9}, fields=fields)
    files = open_adapter(write_adapter(tmp_path / "a", model, adapter), open_checkpoint(model).config)
    scales = {(each.layer, each.part): each.scale for each in files.parts}
    assert (scales[0, "up"], scales[1, "up"], scales[1, "q"]) == (3.0, 1.5, 2.0)


def test_fused_projections_are_split_by_rows(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", TinyModel(architecture="phi3"))
    path = write_adapter(tmp_path / "a", model, TinyAdapter(targets=("qkv_proj", "gate_up_proj")))
    parts = {each.part: each for each in open_adapter(path, open_checkpoint(model).config).parts if each.layer == 1}
    assert [parts[part].up.shape for part in ("q", "k", "v", "gate", "up")] == [(n, 4) for n in (64, 32, 32, 128, 128)]
    assert parts["q"].down == parts["v"].down
    assert parts["k"].up.offset == parts["q"].up.offset + 64 * 4 * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True), ("init_lora_weights", "pissa"), ("layer_replication", [[0, 1]]),
        ("lora_bias", True), ("trainable_token_indices", [1]), ("a_field_of_tomorrow", "on"), ("r", 0),
        ("lora_alpha", None), ("lora_alpha", float("nan")), ("r", float("inf")), ("rank_pattern", [1]),
        ("rank_pattern", {".*": float("inf")}),
    ],
)  # fmt: skip
def test_what_is_more_than_a_plain_adapter_is_refused_by_the_fields_name(
    model: Path, tmp_path: Path, field: str, value: Any
) -> None:
    path = write_adapter(tmp_path / "a", model, TinyAdapter(fields={field: value}))
    with pytest.raises(CheckpointError, match=field):
        open_adapter(path, open_checkpoint(model).config)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", torch.zeros(4, 64)),
        ("base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight", torch.zeros(4, 64)),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 64)),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)),
        (Q_DOWN, torch.zeros(4, 63)),
        (Q_DOWN, torch.zeros(5, 64)),
        (Q_DOWN, torch.zeros(4, 64, dtype=torch.int8)),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.zeros(64)),
    ],
)
def test_a_tensor_that_fits_nothing_is_refused_by_its_name(
    model: Path, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    path = write_adapter(tmp_path / "a", model)
    change_tensors(path, **{name.replace(".", "__"): tensor})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_adapter(path, open_checkpoint(model).config)


def test_half_an_adapted_projection_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", model)
    change_tensors(path, **{Q_DOWN.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj has lora_B and no lora_A"):
        open_adapter(path, open_checkpoint(model).config)


def test_a_target_without_tensors_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", model, TinyAdapter(fields={"target_modules": [*PROJECTIONS, "in_proj"]}))
    with pytest.raises(CheckpointError, match="in_proj"):
        open_adapter(path, open_checkpoint(model).config)


def test_experts_cannot_be_adapted_but_their_attention_can(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", TinyModel(architecture="qwen3_moe"))
    path = write_adapter(tmp_path / "a", model, TinyAdapter(targets=("q_proj", "o_proj")))
    assert {each.part for each in open_adapter(path, open_checkpoint(model).config).parts} == {"q", "output"}
    expert = "base_model__model__model__layers__0__mlp__experts__3__gate_proj__lora_A__weight"
    change_tensors(path, **{expert: torch.zeros(4, 64)})
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.3\.gate_proj\.lora_A"):
        open_adapter(path, open_checkpoint(model).config)


def test_the_digest_changes_with_any_byte_of_either_file(model: Path, tmp_path: Path) -> None:
    spec = open_checkpoint(model).config
    digests = [open_adapter(write_adapter(tmp_path / str(n), model), spec).digest for n in range(2)]
    assert digests[0] == digests[1]
    digests.append(open_adapter(write_adapter(tmp_path / "2", model, TinyAdapter(alpha=9)), spec).digest)
    data = bytearray((tmp_path / "1" / "adapter_model.safetensors").read_bytes())
    data[-100] ^= 1
    (tmp_path / "1" / "adapter_model.safetensors").write_bytes(data)
    digests.append(open_adapter(tmp_path / "1", spec).digest)
    assert len(set(digests[1:])) == 3


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_damaged_file_is_named(model: Path, tmp_path: Path, file: str) -> None:
    spec, path = open_checkpoint(model).config, write_adapter(tmp_path / "a", model)
    (path / file).write_bytes((path / file).read_bytes()[:40])
    with pytest.raises(CheckpointError, match=file):
        open_adapter(path, spec)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        open_adapter(path, spec)


def test_numbers_that_are_json_of_another_kind_are_refused(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", model)
    config = json.loads((path / "adapter_config.json").read_text()) | {"r": "4"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="r should be a number"):
        open_adapter(path, open_checkpoint(model).config)
