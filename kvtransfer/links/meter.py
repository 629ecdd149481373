"""How fast a link is, from its sends: bytes over the time in which at least one was under way. No IO."""

import threading
import time
from collections.abc import Callable

# Older sends count half each time that so much time under way has come together: a link that becomes slow shows.
_HALF_AFTER_S = 1.0


class LinkMeter:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 before the first send has ended."""
        with self._lock:
            return self._num_bytes / self._busy_s if self._busy_s > 0.0 else 0.0

    def started(self) -> None:
        """A send begins."""
        with self._lock:
            if not self._num_under_way:
                self._since_s = self._clock()
            self._num_under_way += 1

    def ended(self, num_bytes: int) -> None:
        """A send is done, or has failed with 0 bytes."""
        with self._lock:
            now_s = self._clock()
            self._busy_s += now_s - self._since_s
            self._since_s = now_s
            self._num_under_way -= 1
            self._num_bytes += num_bytes
            if self._busy_s > _HALF_AFTER_S:
                self._busy_s /= 2
                self._num_bytes /= 2
