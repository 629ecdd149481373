"""Attempts that wait, in the order they will be served: priority, then arrival of their request. Pure: no IO."""

from bisect import insort
from collections.abc import Iterator

from common.values.ids import AttemptId
from router.core.request_state import Attempt, Request

_Entry = tuple[int, int, int]  # priority, arrival, attempt


class AttemptQueue:
    """Owns the order, not the attempts."""

    def __init__(self) -> None:
        self._order: list[_Entry] = []
        self._items: dict[_Entry, tuple[Request, Attempt]] = {}
        self._entries: dict[AttemptId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[Request, Attempt]]:
        """A snapshot: adding and removing meanwhile is allowed."""
        return iter([self._items[entry] for entry in self._order])

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._entries

    def add(self, request: Request, attempt: Attempt) -> None:
        entry = (request.spec.priority, request.ordinal, attempt.attempt_id.attempt)
        assert entry not in self._items, f"{attempt.attempt_id} waits already"
        insort(self._order, entry)
        self._items[entry] = (request, attempt)
        self._entries[attempt.attempt_id] = entry

    def discard(self, attempt_id: AttemptId) -> None:
        entry = self._entries.pop(attempt_id, None)
        if entry is not None:
            self._order.remove(entry)
            del self._items[entry]
