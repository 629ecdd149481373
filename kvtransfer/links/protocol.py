"""What the handoff needs from a transport. Order alone decides: no tags, no headers on this level."""

from collections.abc import Callable
from typing import Protocol

import torch

from common.values.errors import PeerError

# Called once per operation, in the order of the operations of its direction: in the link's own thread, or within `send`
# when that was all it took. None = success.
Done = Callable[[Exception | None], None]


class LinkClosed(PeerError):
    """The link failed or was closed; the message says why. Buffers of failed operations may never be reused."""


class Link(Protocol):
    """Bytes between two workers, in order. Buffers are 1-D uint8, contiguous, on the link's device.

    After the first failure every pending and later operation fails with `LinkClosed`.
    """

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        """Queue a send; `buffer` belongs to the link until `done`."""
        ...

    def receive(self, buffer: torch.Tensor, done: Done) -> None:
        """Queue a receive of at most `buffer.numel()` bytes; `buffer` belongs to the link until `done`.

        NCCL: of exactly that many. Gloo aborts this process on a longer message, and does not report a shorter one.
        """
        ...

    def close(self) -> None:
        """Fail what is pending and free threads and sockets, in the background. Idempotent, never blocks."""
        ...

    def join(self, timeout_s: float) -> bool:
        """After `close`: True when every thread and socket of the link is gone within `timeout_s`."""
        ...
