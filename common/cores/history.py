"""What happened to a key, kept short, for the message of an `InvalidTransition`. Pure: no IO."""

from collections import OrderedDict, deque
from collections.abc import Hashable

from common.values.errors import InvalidTransition

MAX_EVENTS_PER_KEY = 32
MAX_KEYS = 256


class History:
    """The last events of the last keys. Bounded both ways; the oldest key is forgotten first."""

    def __init__(self) -> None:
        self._events: OrderedDict[Hashable, deque[object]] = OrderedDict()

    def note(self, key: Hashable, event: object) -> None:
        """Remember `event`; events are values, so nothing is formatted until the history is printed."""
        events = self._events.get(key)
        if events is None:
            events = self._events[key] = deque(maxlen=MAX_EVENTS_PER_KEY)
            if len(self._events) > MAX_KEYS:
                self._events.popitem(last=False)
        events.append(event)

    def invalid(self, key: Hashable, problem: str) -> InvalidTransition:
        """The error to raise, with the key's whole remembered story."""
        story = "\n  ".join(map(repr, self._events.get(key, ()))) or "(nothing remembered)"
        return InvalidTransition(f"{key}: {problem}; history:\n  {story}")
