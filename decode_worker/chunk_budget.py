"""How many prompt tokens a decode step takes beside its streams: what keeps their gaps within a budget. Pure.

    duration of a step = time of a step that only decodes + prompt tokens / speed

Both terms are measured. With a budget, a step gets as many prompt tokens as should end within it, never fewer than
`MIN_CHUNK`, so that prompts go on whatever the streams take. A step that takes too long lowers the speed, and with it
the next chunk.
"""

# Weight of the newest step: about the last ten steps count.
_NEWEST = 0.2
# Prompt tokens of a step when there are any; fewer would read all weights for next to nothing.
MIN_CHUNK = 16
# Before anything was measured: small, as the first step may be slow.
FIRST_CHUNK = 32
# At least this share of a step's time is charged to its prompt tokens: the other term is a little old.
_LEAST_SHARE = 0.1


class ChunkBudget:
    """Speeds of a decode worker, smoothed. `gap_budget_s` = 0: steps are as large as `max_num_tokens` allows."""

    def __init__(self, gap_budget_s: float, max_num_tokens: int) -> None:
        self._gap_budget_s = gap_budget_s
        self._max_num_tokens = max_num_tokens
        self.step_s = 0.0  # of all steps
        self._decode_s = 0.0  # of steps that only decode
        self._num_tokens = 0.0
        self._prefill_s = 0.0

    def add(self, num_prefill_tokens: int, num_decoding: int, duration_s: float) -> None:
        """One step: `num_prefill_tokens` of prompts, one token of each of `num_decoding` sequences."""
        self.step_s = _smooth(self.step_s, duration_s)
        if num_prefill_tokens == 0:
            self._decode_s = _smooth(self._decode_s, duration_s)
            return
        decode_s = self._decode_s if num_decoding else 0.0
        prefill_s = max(duration_s - decode_s, _LEAST_SHARE * duration_s)
        self._num_tokens = (1 - _NEWEST) * self._num_tokens + num_prefill_tokens
        self._prefill_s = (1 - _NEWEST) * self._prefill_s + prefill_s

    def chunk_tokens(self, num_decoding: int) -> int:
        """Prompt tokens of a step beside so many decoding sequences; what the step has room for is another bound."""
        if self._gap_budget_s == 0.0:
            return self._max_num_tokens
        if self._prefill_s == 0.0:
            return FIRST_CHUNK
        left_s = self._gap_budget_s - (self._decode_s if num_decoding else 0.0)
        return min(max(MIN_CHUNK, int(left_s * self._speed)), self._max_num_tokens)

    def prefill_tokens_per_s(self, num_decoding: int) -> float:
        """How fast a prompt would be computed beside so many decoding sequences; 0.0 until one was."""
        if self._prefill_s == 0.0:
            return 0.0
        if num_decoding == 0:
            return self._speed
        num_tokens = self.chunk_tokens(num_decoding)
        return num_tokens / (self._decode_s + num_tokens / self._speed)

    @property
    def _speed(self) -> float:
        return self._num_tokens / self._prefill_s


def _smooth(value: float, newest: float) -> float:
    return newest if value == 0.0 else value + _NEWEST * (newest - value)
