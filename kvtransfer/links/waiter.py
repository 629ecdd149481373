"""One thread that waits for a link's operations of one direction, in order, and reports each."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch

from kvtransfer.links.protocol import Done, LinkClosed


class Pending(Protocol):
    """An operation under way. `wait` returns when it succeeded and raises when it failed."""

    def wait(self) -> object: ...


class Waiter:
    """Owns every operation given to it until it has ended: a dropped handle would poison the pair.

    `torch.distributed` completes an operation only inside `wait()`, so there is one waiting thread per direction
    and no polling. It starts with the first operation: a one-way link has one.
    """

    def __init__(self, name: str, on_failure: Callable[[str], None]) -> None:
        self._name = name
        self._on_failure = on_failure
        self._queue: SimpleQueue[tuple[Pending, torch.Tensor, Done] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_added = self._num_reported = 0  # each is written by one side alone

    @property
    def is_idle(self) -> bool:
        """Whether everything that was added has been reported."""
        return self._num_added == self._num_reported

    def add(self, pending: Pending, buffer: torch.Tensor, done: Done) -> None:
        """Wait for `pending` after all earlier ones, keep `buffer` alive till then, report to `done`.

        Calls must not overlap.
        """
        self._num_added += 1
        self._queue.put((pending, buffer, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End after what is pending."""
        self._queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._wait(*entry)
            self._num_reported += 1
            del entry

    def _wait(self, pending: Pending, _: torch.Tensor, done: Done) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            reason = f"{self._name}: {_first_line(error)}"
            self._on_failure(reason)
            done(LinkClosed(reason))
        else:
            done(None)


def _first_line(error: BaseException) -> str:
    """torch.distributed appends a C++ stack to its messages."""
    return str(error).partition("\n")[0]
