"""What `python -m tests.tools.house` counts: rooms, arrows, floors and circles."""

from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tools.house import INNER, PACKAGES, House, build, house


def of(*arrows: tuple[str, str]) -> House:
    return House(0, frozenset(room for arrow in arrows for room in arrow), frozenset(arrows))


@pytest.mark.parametrize(
    ("arrows", "floors"),
    [((("a", "b"),), 2), ((("a", "b"), ("b", "c"), ("a", "c")), 3), ((("a", "b"), ("b", "a")), None)],
)
def test_floors_are_the_rooms_on_the_longest_chain(arrows: tuple[tuple[str, str], ...], floors: int | None) -> None:
    assert of(*arrows).num_floors == floors


def test_no_folder_of_ours_has_a_circle() -> None:
    graph = build(Path(ROOT))
    assert [name for name in (*PACKAGES, *INNER) if house(graph, name).num_floors is None] == []
