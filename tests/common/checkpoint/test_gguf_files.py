"""GGUF files as people have them: with a head and without, in parts, with scaled RoPE, in every number format."""

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.ggml_types import GGML_TYPES
from common.checkpoint.rope import DivisorScaling, Llama3Scaling
from common.engine.devices.cpu.native.build import state_of_library
from common.engine.devices.cpu.native.dequantize import dequantize as compiled
from common.engine.model.weights import load_tensors
from tests.tiny_gguf import rope_divisors, write_tiny_gguf
from tests.tiny_model import TinyModel, write_tiny_model

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "hf")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def same_weights(one: Path, other: Path) -> bool:
    first, second = (dict(load_tensors(open_checkpoint(path), torch.float32)) for path in (one, other))
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_file_without_a_head_uses_its_embeddings(tmp_path: Path, is_tied: bool) -> None:
    directory = write_tiny_model(tmp_path / "hf", TinyModel(tie_embeddings=is_tied))
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    assert open_checkpoint(path).config.tie_embeddings == is_tied
    assert same_weights(path, directory)


def test_a_split_model_is_read_in_all_parts(directory: Path, tmp_path: Path) -> None:
    first = write_tiny_gguf(directory, tmp_path / "m.gguf", tensors_per_part=5)
    checkpoint = open_checkpoint(first)
    assert len({tensor.path for tensor in checkpoint.tensors.values()}) > 2
    assert checkpoint.served_name == "m"
    assert same_weights(first, directory)


def test_each_part_counts_in_the_digest(directory: Path, tmp_path: Path) -> None:
    first = write_tiny_gguf(directory, tmp_path / "m.gguf", tensors_per_part=5)
    before = open_checkpoint(first).digest
    last = max(tmp_path.glob("m-*.gguf"))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert open_checkpoint(first).digest != before


def test_a_later_or_a_missing_part_is_named(directory: Path, tmp_path: Path) -> None:
    first = write_tiny_gguf(directory, tmp_path / "m.gguf", tensors_per_part=5)
    second = tmp_path / first.name.replace("-00001-", "-00002-")
    with pytest.raises(CheckpointError, match=f"is a later part of a split model; name the first, {first.name}"):
        open_checkpoint(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"missing beside it: {second.name}"):
        open_checkpoint(first)


def test_a_renamed_part_says_what_it_must_be_called(directory: Path, tmp_path: Path) -> None:
    first = write_tiny_gguf(directory, tmp_path / "m.gguf", tensors_per_part=5)
    with pytest.raises(CheckpointError, match="it must be called NAME-00001-of-"):
        open_checkpoint(first.rename(tmp_path / "renamed.gguf"))


def test_llama3_scaling_is_read_from_the_frequencies_of_the_file(directory: Path, tmp_path: Path) -> None:
    edit(directory / "config.json", rope_theta=500000.0, rope_scaling=LLAMA3)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    assert open_checkpoint(path).config.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert open_checkpoint(path).config.rope_scaling == open_checkpoint(directory).config.rope_scaling
    assert same_weights(path, directory)


def test_frequencies_of_another_scaling_are_kept_as_they_are(directory: Path, tmp_path: Path) -> None:
    scaling = LLAMA3 | {"low_freq_factor": 2.0}
    edit(directory / "config.json", rope_theta=500000.0, rope_scaling=scaling)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    divisors = tuple(rope_divisors(500000.0, 16, scaling).tolist())
    assert open_checkpoint(path).config.rope_scaling == DivisorScaling(divisors)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama__rope__scaling__type": "xpos"}, "llama.rope.scaling.type 'xpos' is not supported"),
        ({"llama__rope__scaling__factor": -2.0}, "llama.rope.scaling.factor should be a positive number, got -2.0"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope' without rope_factors_long.weight and rope_factors_s"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5},
            "'yarn' with yarn_ext_factor is not supported",
        ),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count differs from the head's size"),
        ({"llama__attention__sliding_window": 512}, "llama.attention.sliding_window is not supported"),
        ({"llama__expert_count": 8}, "llama.expert_used_count should be a positive integer, got None"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length differs from key_length"),
        ({"llama__context_length": "long"}, "'llama.context_length' should be a positive integer, got 'long'"),
        ({"llama__attention__head_count_kv": [2, 1]}, r"head_count_kv' should be a positive integer, got \[2, 1\]"),
        ({"llama__block_count": 10**9}, "llama.block_count is 1000000000, beyond any model's"),
        ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "rms_epsilon should be a number, got nan"),
        ({"llama__rope__freq_base": math.inf}, "llama.rope.freq_base should be a positive number, got inf"),
        ({"general__alignment": "x"}, "general.alignment should be a positive integer, got 'x'"),
        ({"tokenizer__chat_template": 3}, "tokenizer.chat_template should be text"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"drop": ("model.norm.weight",)}, "weight output_norm.weight is missing"),
        ({"drop": ("model.layers.1.mlp.up_proj.weight",)}, "weight model.layers.1.mlp.up_proj.weight is missing"),
    ],
    ids=str,
)
def test_what_a_file_asks_for_and_cannot_have_is_named(
    directory: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", **fields)
    with pytest.raises(CheckpointError, match=f"m.gguf.*{words}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"llama__rope__scaling__type": "none"},
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1.0},
        {"llama__attention__head_count_kv": [2, 2]},
        {"llama__expert_count": 0},
    ],
    ids=str,
)
def test_a_field_that_changes_nothing_is_read(directory: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert same_weights(write_tiny_gguf(directory, tmp_path / "m.gguf", **fields), directory)


def test_an_unknown_architecture_is_named(directory: Path, tmp_path: Path) -> None:
    edit(directory / "config.json", model_type="mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not one of llama, qwen2, qwen3"):
        open_checkpoint(write_tiny_gguf(directory, tmp_path / "m.gguf"))


def test_a_file_that_ends_within_its_tensors_is_named(directory: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"m\.gguf is cut off: .* download it again"):
        open_checkpoint(path)


def test_the_table_of_number_formats_is_ggmls() -> None:
    for type_id, ggml in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (ggml.name, (ggml.block_size, ggml.block_bytes))


def test_an_unknown_number_format_is_named(directory: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    entry = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    struct.pack_into("<I", data, entry, 99)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q.weight is of ggml type 99, which is not one of F32, F16"):
        open_checkpoint(path)


def _blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Random blocks with finite scales, uint8 [rows, bytes]."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    numbers = np.random.default_rng(int(kind))
    raw = numbers.integers(0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8)
    if kind == gguf.GGMLQuantizationType.F32:
        return numbers.standard_normal(shape, dtype=np.float32).view(np.uint8)
    for high_byte in _high_bytes_of_scales(kind, block_bytes):
        raw[..., high_byte] &= 0x3B  # an exponent that is neither infinite nor tiny
    return raw.reshape(shape[0], -1)


def _high_bytes_of_scales(kind: gguf.GGMLQuantizationType, block_bytes: int) -> list[int]:
    at_front = {"F16": 1, "BF16": 1, "Q4_0": 1, "Q5_0": 1, "Q8_0": 1, "IQ4_NL": 1, "IQ4_XS": 1, "IQ1_S": 1}
    at_front |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 1)
    if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        return [1, 3]
    if kind.name == "Q2_K":
        return [block_bytes - 3, block_bytes - 1]
    if kind.name == "IQ1_M":
        return [block_bytes - 1, block_bytes - 3, block_bytes - 5, block_bytes - 7]
    if kind.name == "MXFP4":
        return [0]
    return [at_front.get(kind.name, block_bytes - 1)]


@pytest.mark.parametrize("name", [ggml.name for ggml in GGML_TYPES.values()])
def test_each_number_format_is_read_as_the_gguf_library_reads_it(tmp_path: Path, name: str) -> None:
    model = TinyModel(hidden_size=256, intermediate_size=256, num_layers=1)
    directory = write_tiny_model(tmp_path / "hf", model)
    kind = gguf.GGMLQuantizationType[name]
    raw = _blocks(kind, (256, 256))
    checkpoint = open_checkpoint(write_tiny_gguf(directory, tmp_path / "m.gguf", replaced={"mlp.up_proj": (raw, kind)}))
    exact = torch.from_numpy(np.array(gguf.dequantize(raw, kind))).view(256, 256)
    assert torch.isfinite(exact).all()
    for dtype, dequantize in itertools.product((torch.float32, torch.bfloat16), (None, compiled)):
        found = dict(load_tensors(checkpoint, dtype, dequantize))["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(found, exact.to(dtype)), (dtype, dequantize)


@pytest.mark.skipif(not state_of_library()[0], reason="no compiled operators here")
def test_a_format_that_is_not_compiled_is_left_to_the_library() -> None:
    assert compiled("IQ1_S", np.zeros(50, dtype=np.uint8), (1, 256), torch.float32) is None
    assert compiled("Q4_0", np.zeros(18, dtype=np.uint8), (1, 32), torch.float16) is None
