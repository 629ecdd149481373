"""Which failures of steps a worker outlives.

A step that found no memory has left the device as it was: smaller ones go on. An error of a GPU (an illegal address, a
lost device, memory with an uncorrectable error) stays with the process: every later step fails at once, so the worker
looks idle and fast, and would draw all requests to itself. Several other failures in a row are taken for such a one.
"""

from typing import Any

import torch

MAX_IN_A_ROW = 3
_ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # older torch has none
_OF_A_GPU = ("CUDA error", "CUDA driver error", "cuBLAS error", "CUBLAS_STATUS", "device-side assert", "HIP error")


class Failures:
    """Of one executor. Not thread-safe."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, error: Exception) -> bool:
        """A step raised this. True when no later step can be expected to end otherwise."""
        if isinstance(error, torch.OutOfMemoryError):
            _give_memory_back()
            return False
        self._in_a_row += 1
        return is_of_a_gpu(error) or self._in_a_row >= MAX_IN_A_ROW

    def forget(self) -> None:
        """A step has ended well."""
        self._in_a_row = 0


def is_of_a_gpu(error: Exception) -> bool:
    """Whether the device itself is broken, for this process at least."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, _ACCELERATOR_ERROR) or any(mark in str(error) for mark in _OF_A_GPU)


def shown(error: Exception) -> str:
    """For a log. The type alone, since a message of torch's may hold tensor contents; of a GPU's error its first line,
    which names what is broken and nothing of a request.
    """
    name = type(error).__name__
    if is_of_a_gpu(error) or isinstance(error, torch.OutOfMemoryError):
        return f"{name}: {str(error).partition(chr(10))[0]}"
    return name


def _give_memory_back() -> None:
    """What torch keeps for reuse may be in pieces that are too small."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
