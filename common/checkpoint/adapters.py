"""Reads a LoRA adapter as PEFT saves it: low-rank changes of a model's projections. No torch.

A directory of adapter_config.json and adapter_model.safetensors. A projection becomes W + scale * B @ A, with A
[rank, inputs] and B [outputs, rank]; of a projection that fuses several weights each gets its rows of B. Whatever else
such a directory may ask for is refused by its name, and so is a tensor that fits no layer of the model.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint.families import FUSED_PARTS, family_of, layers_of
from common.checkpoint.layers import LayerSpec
from common.checkpoint.model_files import read_json
from common.checkpoint.safetensors_files import read_safetensors_header, refuse_codes
from common.checkpoint.spec import CheckpointError, ModelSpec
from common.checkpoint.tensors import StoredTensor, check_files_are_whole

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTABLE = ("q", "k", "v", "output", "gate", "up", "down")
# What changes nothing that is computed here, or is read.
_NEUTRAL = {
    *(
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
    ),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "r"),
    *("qalora_group_size", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
}
# Ways to begin a training that leave the base weights as they are; others change them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>\d+)\.(?P<name>.+))\.lora_(?P<side>[AB])")


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """`scale * up @ down` is added to the weight of one part of a layer (a key of `LayerSpec.weights`)."""

    layer: int
    part: str
    down: StoredTensor  # [rank, inputs]
    up: StoredTensor  # [outputs, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """`digest` covers all that the directory says, byte for byte."""

    path: Path
    digest: str
    parts: tuple[LowRankPart, ...]


def open_adapter(path: Path | str, spec: ModelSpec) -> AdapterFiles:
    """Read the metadata of an adapter for a model. Raises CheckpointError that names the field or the tensor."""
    path = Path(path).expanduser()
    config, file = read_json(path / CONFIG_FILE), path / TENSORS_FILE
    _check_config(path, config)
    if not file.is_file():
        raise CheckpointError(f"{path}: {TENSORS_FILE} is missing; save the adapter as safetensors")
    tensors = read_safetensors_header(file)
    for tensor in tensors.values():
        refuse_codes(tensor)
    check_files_are_whole(tensors)
    parts = tuple(_parts(path, config, spec, tensors))
    if not parts:
        raise CheckpointError(f"{file} holds no tensors")
    return AdapterFiles(path, _digest(config, file), parts)


def _digest(config: Mapping[str, Any], file: Path) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with file.open("rb") as opened:
        digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises for what is not a plain LoRA adapter, by the field's name."""
    where = path / CONFIG_FILE
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not supported, only 'LORA' is")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{where}: bias {config['bias']!r} is not supported, only 'none' is")
    if config.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        text = f"init_lora_weights {config['init_lora_weights']!r} changes the base weights, which is not supported"
        raise CheckpointError(f"{where}: {text}")
    for name, value in config.items():
        if value and name not in _NEUTRAL and name not in ("bias", "init_lora_weights"):
            raise CheckpointError(f"{where}: {name} is not supported, got {str(value)[:80]!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise CheckpointError(f"{where}: {name} should be an object, got {config[name]!r}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{where}: {name} should be a number above 0, got {value!r}")


def _parts(
    path: Path, config: Mapping[str, Any], spec: ModelSpec, tensors: Mapping[str, StoredTensor]
) -> Iterator[LowRankPart]:
    layers, names = layers_of(spec), family_of(spec).names
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name.removesuffix(".weight"))
        if found is None or int(found["layer"]) >= len(layers):
            raise CheckpointError(f"{path}: tensor {name} fits no layer of the model")
        parts = _parts_of(layers[int(found["layer"])], names, found["name"])
        if not parts:
            known = ", ".join(names[part].rpartition(".")[2] for part in ADAPTABLE)
            raise CheckpointError(f"{path}: tensor {name} changes what adapters cannot change here; of layers: {known}")
        modules.setdefault(found["module"], {})[found["side"]] = tensor
    _check_targets(path, config, modules)
    for module, sides in modules.items():
        if len(sides) < 2:
            (side,) = sides
            raise CheckpointError(f"{path}: {module} has lora_{side} and no lora_{'B' if side == 'A' else 'A'}")
        number, name = int(module.split(".")[2]), module.split(".", 3)[3]
        layer = layers[number]
        parts = _parts_of(layer, names, name)
        _check_shapes(path, layer, parts, sides["A"], sides["B"], _pattern(config, "rank_pattern", module, "r"))
        rank = sides["A"].shape[0]
        if rank < 1:
            raise CheckpointError(f"{path}: tensor {sides['A'].name} has rank 0")
        alpha = _pattern(config, "alpha_pattern", module, "lora_alpha")
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        row = 0
        for part in parts:
            num_rows = layer.weights[part][0]
            yield LowRankPart(number, part, sides["A"], _rows(sides["B"], row, num_rows), scale)
            row += num_rows


def _parts_of(layer: LayerSpec, names: Mapping[str, str], name: str) -> tuple[str, ...]:
    """What a module of a layer holds: one part, several that are fused, or () = nothing that an adapter can change."""
    known = [
        part for part in ADAPTABLE if part in layer.weights and (layer.latent is None or part not in ("q", "k", "v"))
    ]
    by_name: dict[str, tuple[str, ...]] = {names[part]: (part,) for part in known}
    by_name |= {names[fused]: parts for fused, parts in FUSED_PARTS.items() if fused in names}
    parts = by_name.get(name, ())
    return parts if all(part in layer.weights for part in parts) else ()


def _check_targets(path: Path, config: Mapping[str, Any], modules: Mapping[str, object]) -> None:
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            raise CheckpointError(f"{path}: target_modules names {target!r}, and no tensor is of it")


def _check_shapes(
    path: Path, layer: LayerSpec, parts: tuple[str, ...], down: StoredTensor, up: StoredTensor, rank: float
) -> None:
    num_out, num_in = sum(layer.weights[part][0] for part in parts), layer.weights[parts[0]][1]
    for tensor, shape in ((down, (rank, num_in)), (up, (num_out, rank))):
        if tensor.shape != shape:
            raise CheckpointError(f"{path}: tensor {tensor.name}: expected shape {shape}, got {tensor.shape}")


def _pattern(config: Mapping[str, Any], field: str, module: str, otherwise: str) -> float:
    """The value of the first pattern that the module's name ends with, as PEFT chooses it."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(value) if field == "alpha_pattern" else int(value)
        except (re.error, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{CONFIG_FILE}: {field} {pattern!r}: {value!r} cannot be read: {error}") from error
    return float(config[otherwise]) if otherwise == "lora_alpha" else int(config[otherwise])


def _rows(tensor: StoredTensor, first: int, num_rows: int) -> StoredTensor:
    row_bytes = tensor.size_bytes // tensor.shape[0]
    offset, size_bytes = tensor.offset + first * row_bytes, num_rows * row_bytes
    return replace(tensor, shape=(num_rows, *tensor.shape[1:]), offset=offset, size_bytes=size_bytes)
