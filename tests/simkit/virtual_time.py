"""A clock that jumps from one planned action to the next. Actions of one instant run in the order they were planned."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class VirtualTime:
    """Owns the time and everything that is planned. Deterministic: no real time, no threads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = count()
        self._planned: list[tuple[float, int, Action]] = []

    def after(self, delay_s: float, action: Action) -> None:
        """Plan `action` for `delay_s` from now."""
        heapq.heappush(self._planned, (self.now_s + max(0.0, delay_s), next(self._order), action))

    def run_until(self, end_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `end_s`, or until `is_done`."""
        while self._planned and self._planned[0][0] <= end_s and not is_done():
            at_s, _, action = heapq.heappop(self._planned)
            self.now_s = at_s
            action()
        if not is_done():
            self.now_s = end_s
