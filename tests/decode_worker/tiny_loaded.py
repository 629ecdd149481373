"""The tiny model as a worker has it loaded, in float32 on one thread."""

from pathlib import Path
from typing import Any

from common.engine.loading import LoadedModel, load_model
from common.values.config import ModelConfig, WorkerConfig


def load_tiny(path: Path, *, block_size: int, num_blocks: int, role: str = "decode") -> LoadedModel:
    options: dict[str, Any] = {"role": role, "dtype": "float32", "attention": "cpu", "num_threads": 1}
    sizes = {"block_size": block_size, "num_blocks": num_blocks}
    return load_model(WorkerConfig(worker_id="w", model=ModelConfig(path=str(path)), **options, **sizes))
