"""What happened lately, for people: workers that came and went, requests placed anew, what somebody asked for.

Bounded: the newest entries. Owns nothing else; one router's view. No text of any request is in it. No IO.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.values.messages import WorkerState, WorkerStats
from router.core.events import RouterEvent, WorkerConnected, WorkerLost, WorkerMessageReceived

MAX_ENTRIES = 200
_MAX_CHARS = 300


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One entry. `kind` is one of joined, left, lost, retry, drain, scale; `number` counts them from the start."""

    number: int
    age_s: float
    kind: str
    text: str


class EventLog:
    """`note` every event of the router; most are none of its business."""

    def __init__(self, clock: Callable[[], float], max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._num_entries = 0
        self._draining: set[str] = set()  # workers whose end will be no surprise
        self._entries: deque[tuple[int, float, str, str]] = deque(maxlen=max_entries)

    def note(self, event: RouterEvent) -> None:
        """Workers as the router hears of them."""
        if isinstance(event, WorkerConnected):
            self.add("joined", f"{event.info.ref.worker_id}, {event.info.role} at {event.address}")
            self._draining.discard(event.info.ref.worker_id)
        elif isinstance(event, WorkerMessageReceived) and isinstance(event.message, WorkerStats):
            if event.message.state is WorkerState.DRAINING:
                self._draining.add(event.worker.worker_id)
        elif isinstance(event, WorkerLost):
            self.add(self._kind_of_end(event.worker.worker_id), f"{event.worker.worker_id}: {event.reason}")

    def _kind_of_end(self, worker_id: str) -> str:
        """Left after a drain, lost otherwise."""
        if worker_id not in self._draining:
            return "lost"
        self._draining.discard(worker_id)
        return "left"

    def add(self, kind: str, text: str) -> None:
        self._num_entries += 1
        self._entries.append((self._num_entries, self._clock(), kind, text[:_MAX_CHARS]))

    def newest(self, limit: int) -> list[LoggedEvent]:
        """The newest first."""
        now_s = self._clock()
        newest = list(self._entries)[-limit:]
        return [
            LoggedEvent(number, round(now_s - at_s, 1), kind, text) for number, at_s, kind, text in reversed(newest)
        ]
