"""A circuit breaker: stop asking a service that does not answer, try again after a while. Pure: no IO."""


class CircuitBreaker:
    """Opens after `max_failures` in a row; after `retry_after_s` lets one call through to see."""

    def __init__(self, max_failures: int = 3, retry_after_s: float = 1.0) -> None:
        self._max_failures = max_failures
        self._retry_after_s = retry_after_s
        self._num_failures = 0
        self._next_trial_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while calls are held back."""
        return self._num_failures >= self._max_failures

    def allows(self, now_s: float) -> bool:
        """True when a call may be made now. While open, at most one per `retry_after_s`."""
        if not self.is_open:
            return True
        if now_s < self._next_trial_s:
            return False
        self._next_trial_s = now_s + self._retry_after_s
        return True

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, now_s: float) -> None:
        self._num_failures += 1
        self._next_trial_s = now_s + self._retry_after_s
