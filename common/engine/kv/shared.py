"""Memory that the processes of one worker share. Owned by whoever maps it: freed with the last mapping."""

import mmap
import os
import sys
import tempfile

import torch


def new_shared_memory(num_bytes: int) -> int:
    """The descriptor of fresh memory, zeros that take room when first written. The caller closes it."""
    if sys.platform == "linux":
        fd = os.memfd_create("pdserve", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def map_shared_memory(fd: int) -> torch.Tensor:
    """All of it, 1-D uint8. The descriptor may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
