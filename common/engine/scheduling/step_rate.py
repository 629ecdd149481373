"""How fast a worker's steps go, measured and smoothed. Pure: no IO.

duration of a step = time of a step that only decodes + prompt tokens / speed
"""

from common.engine.scheduling.row_times import RowTimes

# Weight of the newest step: about the last ten steps count.
_NEWEST = 0.2
# At least this share of a step's time is charged to its prompt tokens: the other term is a little old.
_LEAST_SHARE = 0.1


class StepRate:
    """Moving averages; each 0.0 until there was a step of its kind."""

    def __init__(self) -> None:
        self.step_s = 0.0  # of all steps, per token that a sequence got
        self.decode_s = 0.0  # of steps that only decode, without drafts
        self.rows = RowTimes()  # of steps that only decode, with drafts and without
        self._num_tokens = 0.0
        self._prefill_s = 0.0

    def add(
        self,
        num_prefill_tokens: int,
        num_decoding: int,
        duration_s: float,
        num_drafts: int = 0,
        num_accepted: int = 0,
    ) -> None:
        """One step: `num_prefill_tokens` of prompts, one token of each of `num_decoding` sequences and drafts."""
        tokens_per_sequence = 1 + num_accepted / num_decoding if num_decoding else 1.0
        self.step_s = _smooth(self.step_s, duration_s / tokens_per_sequence)
        if num_prefill_tokens == 0:
            self.rows.add(num_decoding + num_drafts, duration_s)
            if num_drafts == 0:
                self.decode_s = _smooth(self.decode_s, duration_s)
            return
        decode_s = self.decode_s if num_decoding else 0.0
        prefill_s = max(duration_s - decode_s, _LEAST_SHARE * duration_s)
        self._num_tokens = (1 - _NEWEST) * self._num_tokens + num_prefill_tokens
        self._prefill_s = (1 - _NEWEST) * self._prefill_s + prefill_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of prompt tokens alone, without the time of what decodes beside them."""
        return self._num_tokens / self._prefill_s if self._prefill_s > 0.0 else 0.0


def _smooth(value: float, newest: float) -> float:
    return newest if value == 0.0 else value + _NEWEST * (newest - value)
