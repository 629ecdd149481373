"""How fast steps go, smoothed: what a worker tells routers about itself. Pure: no IO."""

# Weight of the newest step: about the last ten steps count.
_NEWEST = 0.2


class StepRate:
    """Moving averages of step time and tokens per second; 0.0 until the first step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._num_tokens = 0.0
        self._duration_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._duration_s if self._duration_s > 0.0 else 0.0

    def add(self, num_tokens: int, duration_s: float) -> None:
        """One step that computed `num_tokens` prompt tokens. Steps without any count for the step time only."""
        self.step_s = duration_s if self.step_s == 0.0 else self.step_s + _NEWEST * (duration_s - self.step_s)
        if num_tokens > 0:
            self._num_tokens = (1 - _NEWEST) * self._num_tokens + num_tokens
            self._duration_s = (1 - _NEWEST) * self._duration_s + duration_s
