"""A link over NCCL between two GPUs: same shape as gloo's, buffers on the device, waits by CUDA events.

NCCL ignores tags (order alone decides), needs both lengths equal, and refuses two ranks on one GPU. Two things that it
does not do by itself are done here. A dead peer leaves its operations running for ever: they are waited for by asking,
under a limit, and ended by `abort`. And a process group has no communicator before its first operation, which makes one
and blocks until the peer does as well: that operation is a byte, sent while the link is built, under a deadline.

What torch would do about a dead peer, which is to end this process, is switched off in `deploy.worker.env`.
"""

import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from kvtransfer.links.gloo import SENDER_END
from kvtransfer.links.process_group import ProcessGroup, ProcessGroupLink
from kvtransfer.links.waiter import Pending

POLL_S = 0.0005


def is_nccl_available() -> bool:
    """False on CPU builds of torch and on machines without a GPU."""
    return hasattr(c10d, "ProcessGroupNCCL") and torch.cuda.is_available()


class NcclPair:
    """A group of two GPUs and what is in flight on it, whose memory it keeps until that has ended or is aborted."""

    # Any: torch's group and streams have no types, and a test has its own in their place.
    def __init__(self, group: ProcessGroup, end: int, device: torch.device, limit_s: float, cuda: Any) -> None:
        """`limit_s`: for how long the first operation that has not ended may make no progress."""
        self._group = group
        self._other_end = 1 - end
        self._limit_s = limit_s
        self._cuda = cuda
        self._streams = {"send": cuda.Stream(device), "recv": cuda.Stream(device)}
        self._over = threading.Event()
        self._in_flight: dict[int, torch.Tensor] = {}

    def start(self, operation: str, buffer: torch.Tensor) -> Pending:
        """ "send" or "recv". Blocks only where the communicator is not made yet."""
        stream = self._streams[operation]
        pending = _StreamPending(self, stream, self._cuda.Event())
        self._in_flight[id(pending)] = buffer
        with self._cuda.stream(stream):
            pending.work = getattr(self._group, operation)([buffer], self._other_end, 0)
        return pending

    def wait(self, pending: "_StreamPending") -> None:
        """Until the device has done it. Raises RuntimeError where it never will."""
        with self._cuda.stream(pending.stream):
            pending.work.wait()  # orders the side stream after the operation; raises when the communicator failed
            pending.event.record(pending.stream)
        deadline_s = time.monotonic() + self._limit_s
        while not pending.event.query():
            if self._over.wait(POLL_S):
                raise RuntimeError("given up")
            if time.monotonic() > deadline_s:
                self._over.set()  # the others behind it end too
                raise RuntimeError(f"no progress for {self._limit_s:g} s")
        del self._in_flight[id(pending)]

    def give_up(self) -> None:
        """End every wait. Returns at once."""
        self._over.set()

    def abort(self) -> None:
        """End what runs on the device: the kernels of a dead peer's operations spin until then. May block."""
        self._over.set()
        self._group.abort()
        self._in_flight.clear()


class _StreamPending:
    """An operation on a stream of its pair."""

    def __init__(self, pair: NcclPair, stream: Any, event: Any) -> None:
        self.work: Any = None
        self.stream = stream
        self.event = event
        self._pair = pair

    def wait(self) -> None:
        self._pair.wait(self)


def build_nccl_link(store: c10d.Store, end: int, device: torch.device, timeout_s: float, name: str) -> ProcessGroupLink:
    """Blocks until both ends are there; raises RuntimeError when NCCL is absent or the peer does not come."""
    if not is_nccl_available():
        raise RuntimeError("transport nccl needs a CUDA build of torch and a GPU")
    refuse_one_gpu(store, end, str(torch.cuda.get_device_properties(device).uuid))
    nccl: Any = c10d.ProcessGroupNCCL  # absent from CPU builds
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = nccl(store, end, 2, options)
    pair = NcclPair(group, end, device, timeout_s, torch.cuda)
    connect(pair, end, torch.zeros(1, dtype=torch.uint8, device=device), timeout_s)
    return link_over(pair, group, name)


def refuse_one_gpu(store: c10d.Store, end: int, uuid: str) -> None:
    """Raises RuntimeError where both ends have the same GPU, which NCCL would say less clearly and later."""
    store.set(f"gpu/{end}", uuid)
    if store.get(f"gpu/{1 - end}").decode() == uuid:
        raise RuntimeError(f"both workers are on the GPU {uuid}, which NCCL refuses: set transport gloo or auto")


def connect(pair: NcclPair, end: int, byte: torch.Tensor, timeout_s: float) -> None:
    """Have the communicator made. In a thread of its own, since NCCL heeds no deadline: where it never comes back that
    thread is left behind. Raises RuntimeError."""
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def meet() -> None:
        try:
            pair.start("send" if end == SENDER_END else "recv", byte).wait()
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=meet, name="nccl-connect", daemon=True).start()
    try:
        error = outcome.get(timeout=timeout_s)
    except Empty:
        error = RuntimeError(f"the peer made no NCCL communicator within {timeout_s:g} s")
    if error is not None:
        pair.give_up()
        threading.Thread(target=pair.abort, name="nccl-abort", daemon=True).start()
        raise RuntimeError(str(error)) from error


def link_over(pair: NcclPair, group: ProcessGroup, name: str) -> ProcessGroupLink:
    """A link over a pair that is connected."""
    return ProcessGroupLink(
        group,
        lambda _, buffer: pair.start("send", buffer),
        lambda _, buffer: pair.start("recv", buffer),
        name,
        interrupt=lambda _: pair.give_up(),
        abort=lambda _: pair.abort(),
    )
