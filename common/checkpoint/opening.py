"""`open_checkpoint` finds out what kind of model lies at a path."""

from pathlib import Path

from common.checkpoint.checkpoint import Checkpoint
from common.checkpoint.gguf_checkpoint import open_gguf
from common.checkpoint.hf_checkpoint import open_huggingface
from common.checkpoint.model_files import LFS_POINTER, refuse_non_model
from common.checkpoint.spec import CheckpointError


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read the metadata at `path`. Raises CheckpointError that names the path when it cannot be used."""
    path = Path(path).expanduser()
    if path.is_dir():
        return open_huggingface(path)
    if not path.is_file():
        raise CheckpointError(f"no model at {path}: expected a Hugging Face directory or a GGUF file")
    with path.open("rb") as file:
        head = file.read(len(LFS_POINTER))
    refuse_non_model(path, head)
    if not head.startswith(b"GGUF"):
        raise CheckpointError(f"{path} is neither a directory nor a GGUF file (it starts with {head[:4]!r})")
    return open_gguf(path)
