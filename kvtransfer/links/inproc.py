"""A link between two workers in one process: one thread copies. For tests and for roles that share a process."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from kvtransfer.links.protocol import Done, LinkClosed

_Operation = tuple[torch.Tensor, Done]


class _Wire:
    """Both directions and their copying thread. Owned by the two ends together; the first close ends both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._sends: tuple[deque[_Operation], deque[_Operation]] = (deque(), deque())
        self._receives: tuple[deque[_Operation], deque[_Operation]] = (deque(), deque())
        self._copier = ThreadPoolExecutor(1, "inproc-link")

    def add(self, direction: int, operation: _Operation, *, is_send: bool) -> None:
        with self._lock:
            if not self._is_closed:
                (self._sends if is_send else self._receives)[direction].append(operation)
                self._match(direction)
                return
        operation[1](LinkClosed("closed"))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for queue in (*self._sends, *self._receives):
                for _, done in queue:
                    self._copier.submit(done, LinkClosed("closed"))
                queue.clear()
        self._copier.shutdown(wait=False)

    def join(self, timeout_s: float) -> bool:
        threads = list(self._copier._threads)
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _match(self, direction: int) -> None:
        while self._sends[direction] and self._receives[direction]:
            self._copier.submit(_copy, self._sends[direction].popleft(), self._receives[direction].popleft())


def _copy(send: _Operation, receive: _Operation) -> None:
    """Like gloo: a shorter message leaves the tail of the receiver's buffer as it was."""
    (source, source_done), (target, target_done) = send, receive
    assert source.numel() <= target.numel(), "message longer than the posted receive"
    target[: source.numel()].copy_(source)
    source_done(None)
    target_done(None)


class InprocLink:
    """One end."""

    def __init__(self, wire: _Wire, end: int) -> None:
        self._wire = wire
        self._end = end

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        self._wire.add(self._end, (buffer, done), is_send=True)

    def receive(self, buffer: torch.Tensor, done: Done) -> None:
        self._wire.add(1 - self._end, (buffer, done), is_send=False)

    def close(self) -> None:
        self._wire.close()

    def join(self, timeout_s: float) -> bool:
        return self._wire.join(timeout_s)


def inproc_links() -> tuple[InprocLink, InprocLink]:
    """The two ends of a fresh link."""
    wire = _Wire()
    return InprocLink(wire, 0), InprocLink(wire, 1)
