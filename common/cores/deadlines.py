"""Many deadlines, the earliest first. Pure: time is an argument, no IO."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Deadlines(Generic[KeyT]):
    """One absolute deadline per key. Cheap to move and drop: stale heap entries are skipped, then swept."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self._current: dict[KeyT, tuple[float, int]] = {}
        self._counter = 0  # breaks ties, so keys are never compared

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: object) -> bool:
        return key in self._current

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._current)

    def set(self, key: KeyT, deadline_s: float) -> None:
        self._counter += 1
        self._current[key] = (deadline_s, self._counter)
        heapq.heappush(self._heap, (deadline_s, self._counter, key))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(at_s, count, key) for key, (at_s, count) in self._current.items()]
            heapq.heapify(self._heap)

    def discard(self, key: KeyT) -> None:
        self._current.pop(key, None)

    def next_s(self) -> float | None:
        """The earliest deadline, or None without any."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_s: float) -> list[KeyT]:
        """Remove and return every key whose deadline is reached, earliest first."""
        expired: list[KeyT] = []
        self._drop_stale()
        while self._heap and self._heap[0][0] <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._current[key]
            expired.append(key)
            self._drop_stale()
        return expired

    def _drop_stale(self) -> None:
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)


def earliest(*deadlines_s: float | None) -> float | None:
    """The first of some deadlines; None = that one is not set, or none is."""
    return min((at_s for at_s in deadlines_s if at_s is not None), default=None)
