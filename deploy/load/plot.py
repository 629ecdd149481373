"""A run as one SVG picture: first tokens and requests in flight over time, and the distributions. Pure: no IO.

Written by hand, so that a plot needs no plotting library.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from deploy.load.results import Outcome

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 220, 60, 46, 60
_MAX_POINTS = 2000
Point = tuple[float, float]


def svg_of(outcomes: Sequence[Outcome], started_s: float, title: str) -> str:
    """Four panels, two by two."""
    good = [outcome for outcome in outcomes if outcome.event_s and outcome.is_success]
    ttft = [(outcome.planned_s - started_s, outcome.ttft_s * 1000) for outcome in good]
    gaps = [gap * 1000 for outcome in good for gap in outcome.itl_s]
    panels = [
        _panel(0, 0, "TTFT (ms) over time of arrival (s)", _dots(ttft), ttft),
        _panel(1, 0, "requests in flight over time (s)", *_steps(in_flight(outcomes, started_s))),
        _panel(0, 1, "share of requests with a TTFT (ms) of at most", *_cdf([value for _, value in ttft])),
        _panel(1, 1, "share of gaps between tokens (ms) of at most", *_cdf(gaps)),
    ]
    width, height = 2 * (_WIDTH + _LEFT) + 30, 2 * (_HEIGHT + _GAP) + _TOP
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
            ' font-size="11"><rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
            *panels,
            "</svg>\n",
        ]
    )


def in_flight(outcomes: Sequence[Outcome], started_s: float) -> list[Point]:
    """How many requests were open after each change; a request is open from when it was planned."""
    changes = [(outcome.planned_s - started_s, 1) for outcome in outcomes]
    changes += [(outcome.ended_s - started_s, -1) for outcome in outcomes]
    points, count = [], 0
    for at_s, change in sorted(changes):
        count += change
        points.append((at_s, float(count)))
    return points


class _Scale:
    """Data to places in a panel; both axes begin at 0."""

    def __init__(self, points: Iterable[Point]) -> None:
        points = list(points)
        self.x_max = max((x for x, _ in points), default=0.0) or 1.0
        self.y_max = max((y for _, y in points), default=0.0) or 1.0

    def place(self, point: Point) -> str:
        return f"{point[0] / self.x_max * _WIDTH:.1f},{_HEIGHT - point[1] / self.y_max * _HEIGHT:.1f}"


def _panel(column: int, row: int, title: str, drawing: str, points: Sequence[Point]) -> str:
    x, y = _LEFT + column * (_WIDTH + _LEFT), _TOP + row * (_HEIGHT + _GAP)
    axis = "".join(_axis(_Scale(points)))
    return f'<g transform="translate({x},{y})"><text y="-8" fill="#333">{escape(title)}</text>{axis}{drawing}</g>'


def _axis(scale: _Scale) -> Iterator[str]:
    yield f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="#888"/>'
    for share in (0.0, 0.5, 1.0):
        yield f'<text x="{share * _WIDTH}" y="{_HEIGHT + 16}" text-anchor="middle">{share * scale.x_max:.4g}</text>'
        yield f'<text x="-6" y="{_HEIGHT - share * _HEIGHT + 4}" text-anchor="end">{share * scale.y_max:.4g}</text>'


def _dots(points: Sequence[Point]) -> str:
    scale = _Scale(points)
    places = (scale.place(point).split(",") for point in thinned(points))
    return "".join(f'<circle cx="{x}" cy="{y}" r="2" fill="#0b5fcf" fill-opacity=".6"/>' for x, y in places)


def _line(points: Sequence[Point], scale: _Scale) -> str:
    places = " ".join(scale.place(point) for point in points)
    return f'<polyline points="{places}" fill="none" stroke="#0b5fcf" stroke-width="1.5"/>'


def _steps(points: Sequence[Point]) -> tuple[str, Sequence[Point]]:
    corners: list[Point] = []
    for x, y in thinned(points):
        corners += [(x, corners[-1][1] if corners else 0.0), (x, y)]
    return _line(corners, _Scale(points)), points


def _cdf(values: Sequence[float]) -> tuple[str, Sequence[Point]]:
    ordered = sorted(values)
    points = [(value, (idx + 1) / len(ordered)) for idx, value in enumerate(ordered)]
    return _line(thinned(points), _Scale(points)), points


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MAX_POINTS` of them, the last one always."""
    step = max(1, -(-len(points) // _MAX_POINTS))
    return [*points[:-1:step], *points[-1:]]
