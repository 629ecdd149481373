"""Reads a model's GGUF headers: one file, or all parts of a split one. Finds where each tensor lies."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.ggml_types import GGML_TYPES
from common.checkpoint.gguf_metadata import GgufHeader, GgufTensor, read_gguf_header
from common.checkpoint.spec import CheckpointError
from common.checkpoint.tensors import StoredTensor, check_files_are_whole

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """`metadata` is that of the first part; `tensors` those of all, by the name that they have in the file."""

    parts: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf_files(path: Path) -> GgufFiles:
    """`path` is the file, or the first part. Raises CheckpointError that names a part which is missing or damaged."""
    first = read_gguf_header(path)
    parts = _parts(path, first)
    headers = {part: first if part == path else read_gguf_header(part) for part in parts}
    tensors: dict[str, StoredTensor] = {}
    for part, header in headers.items():
        found = {name: _stored(part, tensor) for name, tensor in header.tensors.items()}
        if both := sorted(set(found) & set(tensors)):
            raise CheckpointError(f"{part} holds {both[0]}, and another part does too; download all parts again")
        tensors |= found
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(f"{path}: {expected} tensors were split, the parts hold {len(tensors)}")
    check_files_are_whole(tensors)
    return GgufFiles(tuple(parts), first.metadata, tensors)


def gguf_served_name(path: Path) -> str:
    """The file's name without its ending, and without the number of a part."""
    found = PART.fullmatch(path.name)
    return found["stem"] if found else path.stem


def _parts(path: Path, header: GgufHeader) -> list[Path]:
    count = header.metadata.get("split.count", 0)
    if count <= 1:
        return [path]
    found = PART.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise CheckpointError(f"{path} is one of {count} parts: it must be called NAME-00001-of-{count:05d}.gguf")
    parts = [path.with_name(f"{found['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if header.metadata.get("split.no", 0) != 0 or path != parts[0]:
        raise CheckpointError(f"{path} is a later part of a split model; name the first, {parts[0].name}")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts; missing beside it: {', '.join(missing)}")
    return parts


def _stored(path: Path, tensor: GgufTensor) -> StoredTensor:
    ggml = GGML_TYPES.get(tensor.type_id)
    if ggml is None:
        known = ", ".join(each.name for each in GGML_TYPES.values())
        raise CheckpointError(f"{path}: {tensor.name} is of ggml type {tensor.type_id}, which is not one of {known}")
    row = tensor.shape[-1] if tensor.shape else 1
    if row % ggml.block_size:
        raise CheckpointError(f"{path}: {tensor.name} has rows of {row} values, not whole blocks of {ggml.name}")
    size_bytes = math.prod(tensor.shape) // ggml.block_size * ggml.block_bytes
    return StoredTensor(path, tensor.name, tensor.shape, ggml.name, tensor.offset, size_bytes)
