"""What an autoscaled cluster did over time, as one SVG picture: load, pool sizes, TTFT, TPOT. Pure: no IO."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape

MAX_DOTS = 250
WIDTH, HEIGHT, LEFT, TOP, GAP = 820, 118, 58, 52, 40
PREFILL, DECODE, LOAD, TARGET = "#8250df", "#0a7ea4", "#57606a", "#cf222e"
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment. `wanted` and `ready` are (prefill, decode) workers."""

    at_s: float
    requests_per_s: float
    num_in_flight: float
    wanted: tuple[int, int]
    ready: tuple[int, int]


@dataclass(slots=True)
class Timeline:
    """One run. `ttft_s` and `tpot_s` by the time of arrival; `changes`: (when, role, from, to, why)."""

    title: str
    target_ttft_s: float
    target_tpot_s: float
    num_failed: int = 0
    num_requests: int = 0
    samples: list[Sample] = field(default_factory=list)
    ttft_s: list[Point] = field(default_factory=list)
    tpot_s: list[Point] = field(default_factory=list)
    changes: list[tuple[float, str, int, int, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def num_turns(self) -> int:
        """How often a pool went the other way than before: one step up and one down again is 1 a pool."""
        turns = 0
        for role in ("prefill", "decode"):
            directions = [to > before for _, changed, before, to, _ in self.changes if changed == role]
            turns += sum(one != other for one, other in itertools.pairwise(directions))
        return turns


@dataclass(frozen=True, slots=True)
class Curve:
    """`kind`: steps hold their value until the next point, dots stand alone."""

    name: str
    points: Sequence[Point]
    colour: str
    kind: str = "steps"
    is_dashed: bool = False


def svg_of(timeline: Timeline) -> str:
    """Four panels over one axis of time; dashed: what the autoscaler asked for."""
    end_s = max((sample.at_s for sample in timeline.samples), default=1.0)
    in_flight = [(sample.at_s, sample.num_in_flight) for sample in timeline.samples]
    panels = [
        ("requests in flight", [Curve("in flight", in_flight, LOAD)], None),
        ("workers: ready, and asked for (dashed)", _size_curves(timeline), None),
        ("TTFT in s", [Curve("TTFT", timeline.ttft_s, LOAD, "dots")], timeline.target_ttft_s),
        ("TPOT in s", [Curve("TPOT", timeline.tpot_s, LOAD, "dots")], timeline.target_tpot_s),
    ]
    height = TOP + len(panels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {height}" font-family="sans-serif"'
        ' font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" fill="#1b1f24">{escape(timeline.title)}</text>',
    ]
    parts.append(_overload(timeline.samples, end_s))
    for row, (name, curves, target) in enumerate(panels):
        parts.append(_panel(row, name, curves, end_s, target))
    return "".join([*parts, "</svg>\n"])


def _overload(samples: Sequence[Sample], end_s: float) -> str:
    """A grey band where more than the least arrives, with how much."""
    least = min((sample.requests_per_s for sample in samples), default=0.0)
    parts = []
    for rate, group in itertools.groupby(samples, key=lambda sample: sample.requests_per_s):
        times = [sample.at_s for sample in group]
        if rate > least:
            x, width = times[0] / end_s * WIDTH, (times[-1] - times[0]) / end_s * WIDTH
            bottom = TOP + 3 * (HEIGHT + GAP) + HEIGHT
            parts.append(
                f'<rect x="{LEFT + x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}" fill="#f1f3f6"/>'
            )
            parts.append(
                f'<text x="{LEFT + x + 5:.1f}" y="{TOP + 14}" fill="#57606a">{rate:g} requests/s arrive</text>'
            )
    return "".join(parts)


def _size_curves(timeline: Timeline) -> list[Curve]:
    curves = []
    for idx, (role, colour) in enumerate((("prefill", PREFILL), ("decode", DECODE))):
        # A little apart, so that equal sizes do not hide one another.
        lift = 0.04 * idx
        curves.append(Curve("", [(s.at_s, s.wanted[idx] + lift) for s in timeline.samples], colour, is_dashed=True))
        curves.append(Curve(role, [(s.at_s, s.ready[idx] + lift) for s in timeline.samples], colour))
    return curves


def _panel(row: int, name: str, curves: Sequence[Curve], end_s: float, target: float | None) -> str:
    top = TOP + row * (HEIGHT + GAP)
    values = [value for curve in curves for _, value in curve.points]
    high = _round_up(max([*values, target or 0.0], default=1.0))
    if name.startswith("workers"):
        high = 2.0 * math.ceil(max(values, default=1.0) / 2)  # whole workers at every line
    parts = [
        f'<g transform="translate({LEFT},{top})"><text y="-9" fill="#1b1f24">{escape(name)}</text>',
        _axes(end_s, high),
    ]
    if target is not None:
        y = HEIGHT * (1 - target / high)
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="{TARGET}" stroke-dasharray="5 4" fill="none"/>')
        parts.append(f'<text x="{WIDTH}" y="{y - 4:.1f}" text-anchor="end" fill="{TARGET}">target {target:g} s</text>')
    x = WIDTH
    for curve in curves:
        parts.append(_drawing(curve, end_s, high))
    for curve in reversed([curve for curve in curves if curve.name and len(curves) > 1]):
        parts.append(f'<text x="{x}" y="-9" text-anchor="end" fill="{curve.colour}">■ {escape(curve.name)}</text>')
        x -= 92
    return "".join([*parts, "</g>"])


def _axes(end_s: float, high: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT * (1 - share)
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#e3e7ec" fill="none"/>')
        parts.append(f'<text x="-7" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{share * high:.4g}</text>')
    for at_s in range(0, int(end_s) + 1, 60 if end_s > 240 else 20):
        x, y = at_s / end_s * WIDTH, HEIGHT + 15
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#57606a">{at_s} s</text>')
    return "".join(parts)


def _drawing(curve: Curve, end_s: float, high: float) -> str:
    step = max(1, -(-len(curve.points) // MAX_DOTS)) if curve.kind == "dots" else 1
    placed = [(x / end_s * WIDTH, HEIGHT * (1 - y / high)) for x, y in curve.points[::step] if x <= end_s]
    if curve.kind == "dots":
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{curve.colour}" fill-opacity=".55"/>' for x, y in placed
        )
    dash = ' stroke-dasharray="4 3" stroke-opacity=".7"' if curve.is_dashed else ""
    return f'<path d="{_steps(placed)}" fill="none" stroke="{curve.colour}" stroke-width="1.6"{dash}/>'


def _steps(points: Iterable[Point]) -> str:
    """Only where the value changes: a plot of minutes stays small."""
    path, last = [], None
    for x, y in points:
        if last is None:
            path.append(f"M{x:.1f} {y:.1f}")
        elif f"{y:.1f}" != last:
            path.append(f"H{x:.1f}V{y:.1f}")
        last, last_x = f"{y:.1f}", x
    return "".join([*path, f"H{last_x:.1f}"]) if path else ""


def _round_up(value: float) -> float:
    """To a number that reads well on an axis, also when halved."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12) if value <= power * step * 1.0001)
