"""Reads the small files of a model, and refuses those that are no model file at all, in words that say what to do."""

import json
from pathlib import Path
from typing import Any

from common.checkpoint.spec import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_bytes(path: Path) -> bytes:
    """Raises CheckpointError when the file cannot be read, is empty or is a git-lfs pointer."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    refuse_non_model(path, content[: len(LFS_POINTER)])
    return content


def read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """A JSON object; {} when an optional file is absent."""
    if is_optional and not path.exists():
        return {}
    content = read_bytes(path)
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply for a model's file") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return value


def refuse_non_model(path: Path, head: bytes) -> None:
    """`head` is how the file begins. An empty file and a pointer are what an unfinished download leaves behind."""
    if not head:
        raise CheckpointError(f"{path} is empty; download it again")
    if head.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` beside it")
