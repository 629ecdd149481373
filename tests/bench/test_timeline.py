"""The picture of an autoscaled run: the simulated step does what it should, and the drawing holds what was recorded."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from tests.bench.autoscale_plot import SIM_SETTINGS, simulated
from tests.bench.timeline import HEIGHT, MAX_DOTS, Sample, Timeline, svg_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def step() -> Timeline:
    return simulated()


def sizes(timeline: Timeline, begin_s: float, end_s: float) -> list[tuple[int, int]]:
    return [sample.wanted for sample in timeline.samples if begin_s < sample.at_s <= end_s]


def test_the_simulated_step_grows_both_pools_once_and_shrinks_them_once(step: Timeline) -> None:
    assert set(sizes(step, 0, 60)) == {(1, 1)}
    assert max(sizes(step, 60, 360)) >= (4, 7)
    assert sizes(step, 0, 600)[-1] == (1, 1)
    assert step.num_turns == 2
    late = [ttft_s for at_s, ttft_s in step.ttft_s if 240 < at_s <= 360]
    assert max(late) <= SIM_SETTINGS.target_ttft_s


def test_the_picture_is_valid_and_small_and_marks_the_overload(step: Timeline) -> None:
    picture = ElementTree.fromstring(svg_of(step))
    assert len(svg_of(step)) < 60_000
    assert len(picture.findall(f".//{SVG}circle")) <= 2 * MAX_DOTS
    text = " ".join(element.text or "" for element in picture.iter(f"{SVG}text"))
    assert "6 requests/s arrive" in text
    assert "target 2 s" in text
    band = picture.findall(f"{SVG}rect")[1]
    assert float(band.attrib["width"]) == pytest.approx(820 * 300 / 600, abs=2)


def test_nothing_is_drawn_outside_of_its_panel(step: Timeline) -> None:
    picture = ElementTree.fromstring(svg_of(step))
    heights = [float(circle.attrib["cy"]) for circle in picture.iter(f"{SVG}circle")]
    assert min(heights) >= 0
    assert max(heights) <= HEIGHT
    numbers = [float(n) for path in picture.iter(f"{SVG}path") for n in re.findall(r"V(-?[\d.]+)", path.attrib["d"])]
    assert min(numbers) >= 0


def test_a_turn_is_a_change_of_direction_of_one_pool() -> None:
    quiet = Timeline(
        "t", 1.0, 1.0, changes=[(1.0, "decode", 1, 2, ""), (2.0, "prefill", 3, 2, ""), (3.0, "decode", 2, 4, "")]
    )
    assert quiet.num_turns == 0
    assert replace(quiet, changes=[*quiet.changes, (4.0, "decode", 4, 1, ""), (5.0, "decode", 1, 2, "")]).num_turns == 2


def test_an_empty_run_and_one_of_zeros_are_drawn() -> None:
    ElementTree.fromstring(svg_of(Timeline("nothing", 1.0, 1.0)))
    zeros = Timeline(
        "<zeros>", 1.0, 1.0, samples=[Sample(0.0, 0.0, 0, (0, 0), (0, 0)), Sample(1.0, 0.0, 0, (0, 0), (0, 0))]
    )
    ElementTree.fromstring(svg_of(zeros))
    assert json.loads(json.dumps(zeros.as_json()))["title"] == "<zeros>"
