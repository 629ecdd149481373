"""Buffers that chunks are packed into and received in. Owns their memory; sizes are powers of two, reused.

How many are out is bounded by the cores' windows; how much is kept for reuse is bounded here.
"""

import threading

import torch

MIN_CAPACITY_BYTES = 64 << 10
# Room behind every chunk. Gloo aborts the process when a message is longer than the posted receive, so receives
# are posted with the room included: a message that is too long by up to an eighth is survived and refused.
MIN_SLACK_BYTES = 4 << 10
SLACK_FRACTION = 8


class StagingPool:
    """Thread-safe. Every buffer acquired is either released or forgotten."""

    def __init__(self, max_kept_bytes: int, device: torch.device, *, is_pinned: bool) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._device = device
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._kept_bytes = 0
        self._num_out = 0

    @property
    def num_out(self) -> int:
        """Buffers acquired and neither released nor forgotten."""
        return self._num_out

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def acquire(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer with room for a chunk of `num_bytes` and slack behind it. Contents are arbitrary."""
        capacity = _capacity(num_bytes)
        with self._lock:
            self._num_out += 1
            if kept := self._kept.get(capacity):
                self._kept_bytes -= capacity
                return kept.pop()
        return torch.empty(capacity, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned)

    def release(self, buffer: torch.Tensor) -> None:
        """Give back a buffer that nothing reads or writes any more."""
        with self._lock:
            self._num_out -= 1
            if self._kept_bytes + buffer.numel() <= self._max_kept_bytes:
                self._kept.setdefault(buffer.numel(), []).append(buffer)
                self._kept_bytes += buffer.numel()

    def forget(self) -> None:
        """A buffer was part of an operation that failed: the transport may still touch it, so it is not reused."""
        with self._lock:
            self._num_out -= 1


def _capacity(num_bytes: int) -> int:
    wanted = num_bytes + max(MIN_SLACK_BYTES, num_bytes // SLACK_FRACTION)
    return max(MIN_CAPACITY_BYTES, 1 << (wanted - 1).bit_length())
