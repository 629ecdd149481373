"""What the handoff needs from a transport. Order alone decides: no tags, no headers on this level."""

from collections.abc import Callable
from typing import Protocol

import torch

# Called in the link's own thread, once per operation, in the order of the operations. None = success.
Done = Callable[[Exception | None], None]


class Link(Protocol):
    """One direction of bytes between two workers. Buffers are 1-D uint8, contiguous, on the CPU.

    After the first failure every pending and later operation fails with `LinkClosed`.
    """

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        """Queue a send; `buffer` belongs to the link until `done`."""
        ...

    def receive(self, buffer: torch.Tensor, done: Done) -> None:
        """Queue a receive of exactly `buffer.numel()` bytes; `buffer` belongs to the link until `done`."""
        ...

    def close(self) -> None:
        """Fail what is pending and free threads and sockets. Idempotent; does not block on the peer."""
        ...
