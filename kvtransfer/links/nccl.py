"""A link over NCCL between two GPUs: same shape as gloo's, buffers on the device, waits by CUDA events.

NCCL ignores tags (order alone decides), needs both lengths equal, and refuses two ranks on one GPU. `Work.wait()`
only orders streams, so an operation is waited for by an event that follows it on a side stream.
"""

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from kvtransfer.links.process_group import ProcessGroup, ProcessGroupLink
from kvtransfer.links.waiter import Pending


def is_nccl_available() -> bool:
    """False on CPU builds of torch and on machines without a GPU."""
    return hasattr(c10d, "ProcessGroupNCCL") and torch.cuda.is_available()


class StreamPending:
    """An NCCL operation on `stream`. `wait` blocks the calling thread until the device has done it."""

    def __init__(self, work: Pending, stream: Any, event: Any) -> None:
        self._work = work
        self._stream = stream
        self._event = event

    def wait(self) -> None:
        with torch.cuda.stream(self._stream):
            self._work.wait()  # orders the side stream after the operation; raises when the communicator failed
            self._event.record(self._stream)
        self._event.synchronize()


def build_nccl_link(store: c10d.Store, end: int, device: torch.device, timeout_s: float, name: str) -> ProcessGroupLink:
    """Blocks until both ends are there; raises RuntimeError when NCCL is absent or the peer does not come."""
    if not is_nccl_available():
        raise RuntimeError("transport nccl needs a CUDA build of torch and a GPU")
    nccl: Any = c10d.ProcessGroupNCCL  # absent from CPU builds
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = nccl(store, end, 2, options)
    cuda: Any = torch.cuda  # its classes are untyped
    streams = {"send": cuda.Stream(device), "receive": cuda.Stream(device)}
    other_end = 1 - end

    def start(direction: str, operation: Any, buffer: torch.Tensor) -> Pending:
        with torch.cuda.stream(streams[direction]):
            work: Pending = operation([buffer], other_end, 0)
        return StreamPending(work, streams[direction], cuda.Event())

    def post_send(group: ProcessGroup, buffer: torch.Tensor) -> Pending:
        return start("send", group.send, buffer)

    def post_receive(group: ProcessGroup, buffer: torch.Tensor) -> Pending:
        return start("receive", group.recv, buffer)

    return ProcessGroupLink(group, post_send, post_receive, name)
