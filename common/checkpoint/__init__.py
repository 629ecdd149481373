"""Reads what a model directory or a GGUF file says about itself, without torch: the router uses this too.

Owns configuration, tokenizer, chat template and digests. Weights are read in `common.engine.model.weights`.
"""

from common.checkpoint.checkpoint import Checkpoint
from common.checkpoint.opening import open_checkpoint
from common.checkpoint.spec import CheckpointError, ModelSpec

__all__ = ["Checkpoint", "CheckpointError", "ModelSpec", "open_checkpoint"]
