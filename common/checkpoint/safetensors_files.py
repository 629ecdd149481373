"""Finds the tensors of a Hugging Face directory by reading the headers of its safetensors files. No torch.

Format: 8 bytes of little-endian length, that many bytes of JSON, then the tensors
(https://huggingface.co/docs/safetensors).
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.model_files import LFS_POINTER, read_json, refuse_non_model
from common.checkpoint.spec import CheckpointError
from common.checkpoint.tensors import DERIVED_SUFFIX, StoredTensor, check_files_are_whole

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
CODE_BYTES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.safetensors")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: those of the index, else model.safetensors."""
    return sorted(set(_file_of_tensor(path).values()) or {_single_file(path)})


def stored_tensors(path: Path, *, has_codes: bool = False) -> dict[str, StoredTensor]:
    """By name. The index alone says which file a tensor is read from; what it does not name is left alone.

    `has_codes`: there may be numbers that mean nothing without scales kept elsewhere.
    """
    file_of = _file_of_tensor(path)
    headers = {file: read_safetensors_header(file) for file in weight_files(path)}
    if not file_of:
        found = headers[_single_file(path)]
    else:
        found = {name: _named(headers, name, file) for name, file in file_of.items()}
    tensors = {name: tensor for name, tensor in found.items() if not name.endswith(DERIVED_SUFFIX)}
    for tensor in tensors.values():
        _refuse_kind(tensor, ELEMENT_BYTES | (CODE_BYTES if has_codes else {}))
    check_files_are_whole(tensors)
    _refuse_other_copy(path, tensors)
    return tensors


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Raises CheckpointError when the file is no safetensors file or its header is damaged."""
    with path.open("rb") as file:
        head = file.read(len(LFS_POINTER))
        refuse_non_model(path, head)
        size_bytes = int(struct.unpack("<Q", head[:8].ljust(8, b"\0"))[0])
        if not 0 < size_bytes <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file: its header would be {size_bytes} bytes")
        file.seek(8)
        text = file.read(size_bytes)
    if len(text) < size_bytes:
        raise CheckpointError(f"{path} is cut off within its header; download it again")
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        return {name: _tensor(path, name, entry, 8 + size_bytes) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error!r}") from error


def have_equal_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors are copies. Reads them through, 16 MiB at a time."""
    if (first.shape, first.kind) != (second.shape, second.kind):
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        step = 1 << 24
        for done in range(0, first.size_bytes, step):
            wanted = min(step, first.size_bytes - done)
            if one.read(wanted) != other.read(wanted):
                return False
    return True


def _tensor(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(path, name, tuple(entry["shape"]), entry["dtype"], start + begin, end - begin)


def _file_of_tensor(path: Path) -> dict[str, Path]:
    """The index's map from tensor to file; empty when there is no index."""
    index = path / INDEX_FILE
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor is; download it again")
    files = {name: path / str(file) for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(f"{path}: weight files are missing: {', '.join(missing)}")
    return files


def _single_file(path: Path) -> Path:
    file = path / SINGLE_FILE
    if not file.is_file():
        others = sorted(found.name for pattern in OTHER_WEIGHTS for found in path.glob(pattern))
        advice = f"; {', '.join(others[:4])} cannot stand in for it: save the model as safetensors" if others else ""
        raise CheckpointError(f"{path}: weight files are missing: {SINGLE_FILE} or {INDEX_FILE}{advice}")
    return file


def _refuse_other_copy(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Where both are, transformers reads model.safetensors, not the index: which one is meant is not ours to guess."""
    single = path / SINGLE_FILE
    if not single.is_file() or any(tensor.path == single for tensor in tensors.values()):
        return
    copies = read_safetensors_header(single)
    if not all(name in copies and have_equal_bytes(copies[name], tensor) for name, tensor in tensors.items()):
        raise CheckpointError(f"{path} holds two models: {SINGLE_FILE} and what {INDEX_FILE} names; remove one of them")


def _named(headers: Mapping[Path, Mapping[str, StoredTensor]], name: str, file: Path) -> StoredTensor:
    if name not in headers[file]:
        raise CheckpointError(f"{file} does not hold {name}, which {INDEX_FILE} says it does; download both again")
    return headers[file][name]


def refuse_codes(tensor: StoredTensor) -> None:
    """Raises for codes that are no part of a weight whose encoding is known."""
    _refuse_kind(tensor, ELEMENT_BYTES)


def _refuse_kind(tensor: StoredTensor, element_bytes: Mapping[str, int]) -> None:
    """Raises for kinds of numbers that are not read, and for absurd sizes."""
    if tensor.kind not in element_bytes:
        kinds = ", ".join(element_bytes)
        raise CheckpointError(f"{tensor.path}: {tensor.name} is of type {tensor.kind}; only {kinds} are read")
    if math.prod(tensor.shape) * element_bytes[tensor.kind] != tensor.size_bytes:
        raise CheckpointError(f"{tensor.path}: {tensor.name} {tensor.shape} cannot be {tensor.size_bytes} bytes")
