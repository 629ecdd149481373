"""Hugging Face files with quantized weights: each format is packed here by its definition, and read back exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError, open_checkpoint
from common.engine.model.weights import load_tensors
from tests.common.engine.model.test_architectures import forward_in_chunks, load
from tests.tiny_model import TinyModel, write_tiny_model

Tensors = dict[str, torch.Tensor]
GROUP = 16
# AWQ: the n-th four bits of a word hold this one of its eight columns.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] -> int32 words of neighbouring columns, the first in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), dtype=torch.int64)
    for column in range(codes.shape[1]):
        within = column % per_word
        shift = bits * (columns.index(within) if columns else within)
        words[:, column // per_word] |= codes[:, column].long() << shift
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def scaled(weight: torch.Tensor, rows: int, columns: int, kind: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """One scale for each block of rows x columns."""
    num_out, num_in = weight.shape
    scale = torch.zeros(-(-num_out // rows), -(-num_in // columns))
    codes, exact = torch.zeros(num_out, num_in, dtype=kind), torch.zeros(num_out, num_in)
    largest = 448.0 if kind == torch.float8_e4m3fn else 127.0
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            place = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scale[r, c] = weight[place].abs().max() / largest
            wanted = weight[place] / scale[r, c]
            codes[place] = (wanted if kind == torch.float8_e4m3fn else wanted.round()).to(kind)
            exact[place] = codes[place].float() * scale[r, c]
    return {"weight": codes, "scale": scale}, exact


def fp8_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, exact = scaled(weight, 24, 20, torch.float8_e4m3fn)
    return {"weight": parts["weight"], "weight_scale_inv": parts["scale"]}, exact


def fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, _ = scaled(weight, 1, weight.shape[1], torch.float8_e4m3fn)
    return {"weight": parts["weight"], "weight_scale": parts["scale"].bfloat16().float()}, (
        parts["weight"].float() * parts["scale"].bfloat16().float()
    )


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, exact = scaled(weight, *weight.shape, torch.float8_e4m3fn)
    scale = parts["scale"].view(1)
    return {"weight": parts["weight"], "weight_scale": scale, "input_scale": torch.ones(1)}, exact


def int8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, exact = scaled(weight, 1, weight.shape[1], torch.int8)
    return {"weight": parts["weight"], "weight_scale": parts["scale"]}, exact


def grouped(
    weight: torch.Tensor, bits: int, groups: torch.Tensor | None = None, *, is_symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zeros and scales [out, groups], and the numbers that they stand for."""
    of_input = torch.arange(weight.shape[1]) // GROUP if groups is None else groups
    num_groups, top = int(of_input.max()) + 1, (1 << bits) - 1
    codes, exact = torch.zeros(weight.shape), torch.zeros(weight.shape)
    zeros, scales = torch.zeros(weight.shape[0], num_groups), torch.zeros(weight.shape[0], num_groups)
    for group in range(num_groups):
        inputs = (of_input == group).nonzero()[:, 0]
        part = weight[:, inputs]
        low, high = part.amin(1).clamp(max=-0.01), part.amax(1).clamp(min=0.01)
        scales[:, group] = (2 * part.abs().amax(1) if is_symmetric else high - low) / top
        scales[:, group] = scales[:, group].half().float()
        middle = torch.full_like(low, 1 << (bits - 1))
        zeros[:, group] = middle if is_symmetric else (-low / scales[:, group]).round().clamp(1, top)
        scale, zero = scales[:, group, None], zeros[:, group, None]
        codes[:, inputs] = (part / scale + zero).round().clamp(0, top)
        exact[:, inputs] = (codes[:, inputs] - zero) * scale
    return codes, zeros, scales, exact


def packed(bits: int, *, is_symmetric: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, exact = grouped(weight, bits, is_symmetric=is_symmetric)
        parts = {"weight_packed": pack(codes, bits), "weight_scale": scales.half()}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if not is_symmetric:
            parts["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
        return parts, exact

    return quantize


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, exact = grouped(weight, 4)
    packed_zeros, words = pack(zeros.T, 4, AWQ_COLUMNS), pack(codes.T, 4, AWQ_COLUMNS)
    return {"qweight": words, "qzeros": packed_zeros, "scales": scales.T.half().contiguous()}, exact


def gptq(
    bits: int, *, has_order: bool = False, offset: int = 1
) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        groups = torch.arange(weight.shape[1]) // GROUP
        groups = groups[order] if has_order else groups
        codes, zeros, scales, exact = grouped(weight, bits, groups)
        words, packed_zeros = pack(codes, bits).T.contiguous(), pack(zeros.T - offset, bits)
        parts = {"qweight": words, "qzeros": packed_zeros, "scales": scales.T.half().contiguous()}
        return parts | {"g_idx": groups.int()}, exact

    return quantize


def compressed(stored: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": strategy, "symmetric": True} | fields
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


Format = tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]
FORMATS: dict[str, Format] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [24, 20]}, fp8_block),
    "fp8 of channels": (compressed("float-quantized", 8, "channel"), fp8_channel),
    "fp8 of tensors": (compressed("float-quantized", 8, "tensor"), fp8_tensor),
    "int8 of channels": (compressed("int-quantized", 8, "channel"), int8_channel),
    "w4a16": (compressed("pack-quantized", 4, "group", group_size=GROUP), packed(4, is_symmetric=True)),
    "w4a16 with zeros": (compressed("pack-quantized", 4, "group", symmetric=False), packed(4, is_symmetric=False)),
    "w8a16": (compressed("pack-quantized", 8, "group"), packed(8, is_symmetric=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4)),
    "gptq with 8 bits": ({"quant_method": "gptq", "bits": 8}, gptq(8)),
    "gptq by order of activations": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, has_order=True)),
    "gptq of version 2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, offset=0)),
}


def write(
    path: Path, format_name: str, model: TinyModel, change: Callable[[Tensors], Tensors] = dict
) -> tuple[Path, Tensors]:
    """The directory, and the numbers that its weights stand for. `change` is made to what is stored."""
    config, quantize = FORMATS[format_name]
    write_tiny_model(path, model)
    stored: Tensors = {}
    exact: Tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        exact[name] = stored[name] = tensor
        if name.endswith("_proj.weight"):
            parts, exact[name] = quantize(tensor)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    save_file(change(stored), path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(fields))
    return path, exact


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_what_its_codes_stand_for(tmp_path: Path, name: str) -> None:
    path, exact = write(tmp_path / "m", name, TinyModel(num_layers=1))
    checkpoint = open_checkpoint(path)
    found = dict(load_tensors(checkpoint, torch.float32))
    assert found.keys() == exact.keys()
    for weight, expected in exact.items():
        torch.testing.assert_close(found[weight], expected, rtol=1e-6, atol=1e-7, msg=weight)
    assert checkpoint.stored_as is not None


def test_experts_with_scales_of_their_own_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    model = TinyModel(architecture="qwen3_moe")
    path, exact = write(tmp_path / "m", "fp8 in blocks", model)
    plain = write_tiny_model(tmp_path / "plain", model)
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(forward_in_chunks(*load(path), [20]), forward_in_chunks(*load(plain), [20]))


def test_fp8_in_blocks_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    path, _ = write(tmp_path / "m", "fp8 in blocks", TinyModel(num_layers=1))
    stored, found = load_file(path / "model.safetensors"), dict(load_tensors(open_checkpoint(path), torch.float32))
    for name in (name for name in found if name.endswith("_proj.weight")):
        codes, scale = stored[name], stored[f"{name}_scale_inv"]
        expected = fp8._dequantize_fp8_weight(codes, scale, [24, 20], torch.float32)
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_experts, in, out] -> codes [num_experts, out, in / 32, 16] and scales, groups of 32 inputs."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    powers = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = (groups / powers.exp2()[..., None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (powers + 127).to(torch.uint8)


def test_mxfp4_experts_give_the_logits_of_what_transformers_makes_of_them(tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    model = TinyModel(architecture="gpt_oss")
    path, plain = (write_tiny_model(tmp_path / name, model) for name in ("m", "plain"))
    tensors = load_file(path / "model.safetensors")
    stored, exact = dict(tensors), dict(tensors)
    for name in (name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        codes, scales = mxfp4(stored.pop(name))
        stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        exact[name] = theirs.convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(fields))
    assert torch.equal(forward_in_chunks(*load(path), [20]), forward_in_chunks(*load(plain), [20]))
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="down_proj_scales is missing"):
        open_checkpoint(path)


PROJECTION = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "part", "value", "words"),
    [
        (
            "fp8 in blocks",
            "weight_scale_inv",
            None,
            f"weight {PROJECTION}.weight_scale_inv is missing beside the codes",
        ),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(5, 4), r"\(5, 4\) does not fit a weight \(128, 64\)"),
        ("w4a16", "weight_scale", torch.ones(64, 4), r"weight_scale: expected shape \(128, 'any'\), got \(64, 4\)"),
        ("w4a16", "weight_scale", torch.ones(128, 3), "64 inputs are not 3 groups of one size"),
        ("awq", "qzeros", None, f"weight {PROJECTION}.qzeros is missing beside the codes"),
        ("awq", "qweight", torch.ones(32, 16).int(), r"expected shape \(128, 64\), .*got \(128, 32\)"),
        ("gptq", "g_idx", torch.ones(3).int(), r"g_idx: expected shape \(64,\), got \(3,\)"),
        ("gptq", "other", torch.ones(3).int(), f"{PROJECTION}.other is of type I32"),
    ],
)
def test_a_part_that_is_missing_or_does_not_fit_is_named(
    tmp_path: Path, name: str, part: str, value: torch.Tensor | None, words: str
) -> None:
    def change(stored: Tensors) -> Tensors:
        left = {each: tensor for each, tensor in stored.items() if each != f"{PROJECTION}.{part}"}
        return left if value is None else left | {f"{PROJECTION}.{part}": value}

    path, _ = write(tmp_path / "m", name, TinyModel(num_layers=1), change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method='bitsandbytes' is not supported, only fp8, compressed-tensors",
        ),
        ("fp8", "quantization_config='fp8' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported"),
        ({"quant_method": "awq", "bits": 3}, "bits=3 is not supported, only 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 2}, "bits=2 is not supported, only 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (compressed("marlin-24", 4, "group"), "format='marlin-24' is not supported"),
        (compressed("float-quantized", 4, "group"), "num_bits=4 is not supported, only 8"),
        (compressed("int-quantized", 8, "token"), "strategy='token' is not supported"),
        (compressed("pack-quantized", 4, "group") | {"config_groups": {}}, "config_groups={} is not supported"),
        (
            compressed("pack-quantized", 4, "group") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format='sparse-24-bitmask' is not supported",
        ),
    ],
    ids=str,
)
def test_a_method_that_is_not_offered_is_named(tmp_path: Path, config: Any, words: str) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(num_layers=1))
    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
