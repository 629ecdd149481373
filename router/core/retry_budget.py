"""Bounds how often all requests together may replace a worker, so that a failing cluster is not flooded. Pure."""


class RetryBudget:
    """A token bucket: bursts of `capacity` (one death hits every request on the worker), then `per_s` on average."""

    def __init__(self, capacity: float, per_s: float) -> None:
        self._capacity = capacity
        self._per_s = per_s
        self._level = capacity
        self._at_s: float | None = None

    def try_spend(self, now_s: float) -> bool:
        """Take one retry; False when the budget is used up."""
        if self._at_s is not None:
            self._level = min(self._capacity, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
