"""A worker's way out, as both cores keep it. Pure: time is an argument."""

from common.cores.deadlines import earliest


class Draining:
    """Nothing new once requested, nothing at all once over. Over at the deadline, or sooner when all work is done."""

    def __init__(self) -> None:
        self._deadline_s: float | None = None
        self._is_over = False

    @property
    def is_requested(self) -> bool:
        return self._deadline_s is not None

    def request(self, deadline_s: float) -> None:
        """A second request can only make it shorter."""
        self._deadline_s = earliest(self._deadline_s, deadline_s)

    def next_s(self) -> float | None:
        """When it must be over; None before a drain was asked for, and after its end."""
        return None if self._is_over else self._deadline_s

    def is_due(self, now_s: float) -> bool:
        next_s = self.next_s()
        return next_s is not None and next_s <= now_s

    def ends(self, *, is_idle: bool) -> bool:
        """True once: when a drain was requested, is not over yet, and there is nothing left to do."""
        if self.next_s() is None or not is_idle:
            return False
        self._is_over = True
        return True
