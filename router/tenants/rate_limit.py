"""A budget that comes back evenly: one bucket per limit and tenant. Pure: no IO, no clock."""

import math


class Bucket:
    """Holds up to `per_minute`; what is taken beyond that is a debt, and nothing is given until it is paid."""

    __slots__ = ("_at_s", "_level", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken; 0 = now. More than the bucket holds needs a full bucket."""
        lacking = min(amount, self.per_minute) - self._refilled(now_s)
        return max(0.0, lacking * 60.0 / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take it, whether it is there or not."""
        self._level = self._refilled(now_s) - amount

    def remaining(self, now_s: float) -> int:
        """What could be taken now."""
        return max(0, math.floor(self._refilled(now_s)))

    def reset_s(self, now_s: float) -> float:
        """Seconds until the bucket is full."""
        return (self.per_minute - self._refilled(now_s)) * 60.0 / self.per_minute

    def resized(self, per_minute: int, now_s: float) -> "Bucket":
        """The same use under another limit: what was taken stays taken."""
        bucket = Bucket(per_minute, now_s)
        bucket._level -= self.per_minute - self._refilled(now_s)
        return bucket

    def _refilled(self, now_s: float) -> float:
        level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60.0)
        self._level, self._at_s = level, now_s
        return level


def duration_text(seconds: float) -> str:
    """As OpenAI's headers write it: 120ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds * 1e3) / 1e3, 60.0)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
