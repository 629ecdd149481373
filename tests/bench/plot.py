"""A bar chart as SVG, without a plotting library: per metric ours beside its peers, as a share of the best."""

from html import escape
from pathlib import Path
from typing import Any

BAR, GAP, LABEL, WIDTH = 12, 10, 380, 420
COLOURS = ("#1f6feb", "#8b949e", "#bf8700", "#8250df", "#1a7f37", "#cf222e")


def write_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Only metrics that have a peer or a floor: a bar needs something to stand beside."""
    parts, top = [], GAP
    for row in rows:
        values = {"pdserve": row["ours"], **row["peers"]} | ({"floor": row["floor"]} if row["floor"] else {})
        if len(values) > 1:
            parts.append(_group(row, values, top))
            top += BAR * len(values) + GAP
    size = f'width="{LABEL + WIDTH + 160}" height="{top}"'
    style = "<style>text{font:10px sans-serif}</style>"
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n')


def _group(row: dict[str, Any], values: dict[str, float], top: int) -> str:
    greatest = max(values.values())
    parts = [f'<text x="4" y="{top + BAR - 3}">{escape(row["metric"])}</text>']
    for number, (name, value) in enumerate(values.items()):
        y, length = top + number * BAR, WIDTH * value / greatest
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
        label = f"{name} {value:.4g} {row['unit']}"
        parts.append(f'<text x="{LABEL + length + 4:.1f}" y="{y + BAR - 3}">{escape(label)}</text>')
    return "".join(parts)
