"""How long steps of so many rows take, measured: what one more row costs. Pure: no IO.

While weights are read once for all rows, a row more costs next to nothing; once the processor is busy it costs its
share. Where that turn is depends on model, hardware and context: it is not computed but measured, by the steps that run
anyway.
"""

from bisect import bisect_left, insort

# Up to so many rows each number is measured by itself, above in eights.
_EXACT = 64
# Weight of the newest step of as many rows.
_NEWEST = 0.2
# A measured time counts for so many steps: contexts grow, other programs come and go.
_MAX_AGE = 512
_FORGET_EVERY = 64
# The line beyond the largest step goes through one of at most this share of its rows: neighbours differ by chance.
_FAR_APART = 0.8
# A single step counts as at most so many times the usual: whatever else held it up is no property of its rows.
_MAX_RATIO = 2.0


class RowTimes:
    """Moving averages of the newest steps, by number of rows."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._times: dict[int, tuple[float, int]] = {}  # rows -> (seconds, number of the last step)
        self._rows: list[int] = []  # the same rows, in order

    def add(self, num_rows: int, duration_s: float) -> None:
        """A step of prompts' last tokens and drafts alone."""
        self._num_steps += 1
        rows = _rounded(num_rows)
        if rows not in self._times:
            insort(self._rows, rows)
            self._times[rows] = duration_s, 0
        usual_s, _ = self._times[rows]
        newest_s = min(duration_s, _MAX_RATIO * usual_s)
        self._times[rows] = usual_s + _NEWEST * (newest_s - usual_s), self._num_steps
        if self._num_steps % _FORGET_EVERY == 0:
            self._forget()

    @property
    def max_rows(self) -> int:
        """The most rows that were measured; 0 = none were."""
        return self._rows[-1] if self._rows else 0

    def time_s(self, num_rows: int) -> float:
        """Of a step of so many rows: between two that were measured, or on the line of the last two. 0.0: none was."""
        if not self._rows:
            return 0.0
        at = bisect_left(self._rows, num_rows)
        if at == 0:
            return self._times[self._rows[0]][0]
        if at == len(self._rows):
            last = self._rows[-1]
            slope_s = max(0.0, self._slope_s(self._rows[bisect_left(self._rows, _FAR_APART * last) - 1], last))
            return self._times[last][0] + slope_s * (num_rows - last)
        below, above = self._rows[at - 1], self._rows[at]
        return self._times[above][0] - self._slope_s(below, above) * (above - num_rows)

    def _slope_s(self, below: int, above: int) -> float:
        """Seconds per row between two that were measured; 0.0 where they are not in order."""
        if below >= above:
            return 0.0
        return (self._times[above][0] - self._times[below][0]) / (above - below)

    def _forget(self) -> None:
        self._times = {rows: time for rows, time in self._times.items() if self._num_steps - time[1] < _MAX_AGE}
        self._rows = sorted(self._times)


def _rounded(num_rows: int) -> int:
    return num_rows if num_rows <= _EXACT else -(-num_rows // 8) * 8
