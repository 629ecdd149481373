"""A GPU of this machine that torch does not see."""

import os
from pathlib import Path

import torch

from common.checkpoint import CheckpointError


def refuse_hidden_gpu(root: Path = Path("/")) -> None:
    """Raises CheckpointError where there is a GPU that torch does not see: nobody wants that served on the CPU.

    Not where CUDA_VISIBLE_DEVICES hides it on purpose. `root` is for tests.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if (root / "dev/nvidiactl").exists() and not is_hidden:
        raise CheckpointError(
            f"there is an NVIDIA GPU, and torch {torch.__version__} does not see it: install a torch for the driver's "
            "CUDA (pdserve doctor says more), or set attention: cpu to serve from the CPU"
        )
