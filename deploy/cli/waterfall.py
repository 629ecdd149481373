"""Draws where a request's time went, as aligned bars in text. Pure: no IO."""

from dataclasses import dataclass

_LABEL_WIDTH = 12
_BAR_WIDTH = 40
_FULL, _HIDDEN, _TICK = "█", "░", "▏"


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A request's phases in seconds, one after another; only `hidden_transfer_s` runs beside the prefill."""

    route_s: float
    queue_s: float
    prefill_s: float
    hidden_transfer_s: float
    exposed_transfer_s: float
    decode_queue_s: float
    decode_s: float
    first_token_s: float
    kv_bytes: int = 0
    num_tokens: int = 0

    @property
    def wall_s(self) -> float:
        """What the parts add up to."""
        before = self.route_s + self.queue_s + self.prefill_s
        return before + self.exposed_transfer_s + self.decode_queue_s + self.decode_s


def render(waterfall: Waterfall) -> list[str]:
    """One line per phase on a common time axis, then a summary."""
    scale = _BAR_WIDTH / waterfall.wall_s if waterfall.wall_s > 0 else 0.0
    start_s = 0.0
    lines = []
    for label, duration_s in (
        ("route", waterfall.route_s),
        ("queue", waterfall.queue_s),
        ("prefill", waterfall.prefill_s),
        ("transfer", waterfall.exposed_transfer_s),
        ("decode queue", waterfall.decode_queue_s),
        ("decode", waterfall.decode_s),
    ):
        is_transfer = label == "transfer"
        bar = _bar(start_s, duration_s, waterfall.hidden_transfer_s if is_transfer else 0.0, scale)
        note = _transfer_note(waterfall) if is_transfer else _milliseconds(duration_s)
        lines.append(f"{label:<{_LABEL_WIDTH}} |{bar}| {note}")
        start_s += duration_s
    return [*lines, _summary(waterfall)]


def _bar(start_s: float, duration_s: float, hidden_s: float, scale: float) -> str:
    """`hidden_s` is drawn before the start, lighter: that part cost nothing."""
    begin = round(max(0.0, start_s - hidden_s) * scale)
    start, end = round(start_s * scale), round((start_s + duration_s) * scale)
    drawn = _HIDDEN * (start - begin) + _FULL * (end - start)
    if not drawn and duration_s + hidden_s > 0:
        drawn = _TICK
        begin = min(begin, _BAR_WIDTH - 1)
    return (" " * begin + drawn).ljust(_BAR_WIDTH)


def _transfer_note(waterfall: Waterfall) -> str:
    if not waterfall.kv_bytes:
        return "none: prefilled where it is decoded"
    total_s = waterfall.hidden_transfer_s + waterfall.exposed_transfer_s
    size = f"{waterfall.kv_bytes / 1e6:.1f} MB"
    return f"{_milliseconds(total_s)}, {_milliseconds(waterfall.exposed_transfer_s).strip()} of it exposed, {size}"


def _summary(waterfall: Waterfall) -> str:
    parts = [
        f"total {_milliseconds(waterfall.wall_s).strip()}",
        f"first token after {_milliseconds(waterfall.first_token_s).strip()}",
    ]
    after_first_s = waterfall.wall_s - waterfall.first_token_s
    if waterfall.num_tokens > 1 and after_first_s > 0:
        parts.append(f"then {(waterfall.num_tokens - 1) / after_first_s:.1f} tokens/s")
    return ", ".join(parts)


def _milliseconds(duration_s: float) -> str:
    return f"{duration_s * 1000:8.1f} ms"
