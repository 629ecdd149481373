"""One request on the operator's page: its waterfall, its marks, its trace; in a real browser."""

import itertools
import json
import time
from pathlib import Path

import pytest

from tests.ui.browser import Browser
from tests.ui.page_service import LONG_ID, TIMINGS, Served, record
from tests.ui.steps import select

NUM_PHASES = 6


def test_the_waterfalls_parts_add_up_to_the_wall_time(tab: Browser) -> None:
    select(tab, LONG_ID)
    bars = tab.script(
        "return [...document.querySelectorAll('.phase rect')].map(r => [r.x.baseVal.value, r.width.baseVal.value])"
    )
    span = tab.script("return document.querySelector('.waterfall').viewBox.baseVal.width") - 98 - 66
    assert sum(width for _, width in bars) / span == pytest.approx(1.0, abs=0.005)
    for (x, width), (following, _) in itertools.pairwise(bars):
        assert following == pytest.approx(x + width, abs=1.6)
    assert len(bars) == NUM_PHASES


def test_phases_have_the_words_of_the_command_line(tab: Browser) -> None:
    select(tab, LONG_ID)
    words = tab.script("return [...document.querySelectorAll('.phase text:not(.value)')].map(t => t.textContent)")
    assert words == ["route", "queue", "prefill", "transfer", "decode queue", "decode"]


def test_a_phase_of_nothing_leaves_no_mark(tab: Browser, page: Served) -> None:
    before = page.service.records
    page.service.records = (record("req-quick", timings=TIMINGS | {"decode_queue_s": 0.00001, "kv_exposed_s": 0.0}),)
    tab.wait("return document.querySelectorAll('#requests tr').length === 1")
    select(tab, "req-quick")
    marked = tab.script("return [...document.querySelectorAll('.phase:has(rect)')].map(g => g.textContent)")
    page.service.records = before
    assert [text for text in marked if "transfer" in text or "decode queue" in text] == []
    assert len(marked) == NUM_PHASES - 2


@pytest.mark.parametrize(
    ("end", "most", "ticks"),
    [
        (3.34, 6, [0, 1, 2, 3]),
        (0.316, 6, [0, 0.1, 0.2, 0.3]),
        (1.0, 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (12.2, 3, [0, 10]),
    ],
)
def test_axes_have_round_ticks(tab: Browser, end: float, most: int, ticks: list[float]) -> None:
    found = tab.script(
        "const [end, most] = arguments;"
        "return import(new URL('waterfall.js', document.baseURI)).then(m => m.roundTicks(end, most))",
        end, most,
    )  # fmt: skip
    assert found == pytest.approx(ticks)


def test_marks_have_a_legend_and_edges_of_chunks_are_seen_below_ticks(tab: Browser) -> None:
    select(tab, LONG_ID)
    assert tab.text("#detail .legend").split("\n") == ["prefill chunk", "KV of some layers in place"]
    bottoms = tab.script(
        "const bottom = e => e.getBoundingClientRect().bottom;"
        "return [Math.max(...[...document.querySelectorAll('.tick')].map(bottom)),"
        " Math.min(...[...document.querySelectorAll('.chunk')].map(bottom))]"
    )
    assert bottoms[0] < bottoms[1] - 5


def test_prefill_chunks_and_kv_chunks_stand_on_the_prefill_bar(tab: Browser) -> None:
    select(tab, LONG_ID)
    chunks = tab.script("return [...document.querySelectorAll('.chunk title')].map(t => t.textContent)")
    ticks = tab.script("return [...document.querySelectorAll('.tick')].map(t => t.textContent)")
    assert chunks[0] == "prefill chunk 1: 512 tokens in 100 ms"
    assert (len(chunks), len(ticks)) == (3, 12)
    assert ticks[1].startswith("KV of layers 10 to 19, 512 tokens")
    assert "94 % hidden behind prefill" in tab.text("#detail")


def test_the_trace_opens_as_chrome_trace_events(tab: Browser) -> None:
    select(tab, LONG_ID)
    trace = tab.script(
        "const done = import(new URL('trace.js', document.baseURI));"
        "return done.then(m => fetch('../admin/v1/requests/' + arguments[0]).then(r => r.json()).then(m.traceOf))",
        LONG_ID,
    )
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    assert sum(span["dur"] for span in spans) == pytest.approx(1e6)
    assert all(event["ts"] >= 0 for event in trace["traceEvents"] if event["ph"] != "M")
    assert {event["name"] for event in trace["traceEvents"]} >= {"prefill", "chunk 3", "first token", "layers 0-9"}


def test_export_saves_a_file(tab: Browser, tmp_path: Path) -> None:
    tab.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    select(tab, "req-00")
    tab.click(".detail-head button")
    file, deadline_s = tmp_path / "req-00.trace.json", time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert json.loads(file.read_text())["otherData"] == {"request_id": "req-00"}


@pytest.mark.parametrize("width", [375, 1280])
def test_columns_and_durations_stay_in_view_beside_an_open_detail(tab: Browser, width: int) -> None:
    tab.set_window(width, 1300)
    select(tab, LONG_ID)
    outside = tab.script(
        "const outside = e => { const b = e.getBoundingClientRect(), l = e.closest('.scroll, #detail')"
        ".getBoundingClientRect(); return b.left < l.left - 1 || b.right > l.right + 1; };"
        "const all = document.querySelectorAll('#requests tr:first-child > *, .waterfall .value');"
        "return [...all].filter(outside).length"
    )
    shown = tab.script("return [...document.querySelector('#requests tr').children].every(c => c.offsetWidth > 20)")
    tab.set_window(1400, 1300)
    assert (outside, shown) == (0, True)
