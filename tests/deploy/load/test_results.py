"""Latencies from the planned time, percentiles, goodput, the report's form and the plot."""

import random
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from deploy.load.plot import in_flight, svg_of, thinned
from deploy.load.report import as_json, errors_of, lines_of
from deploy.load.results import Goal, Outcome, Spread, percentile, summarize

# Planned at 10, sent late at 10.5, tokens at 11, 11.1, 11.4; five tokens in three events.
ONE = Outcome(10.0, 10.5, 11.5, [11.0, 11.1, 11.4], 100, 5)
FAILED = Outcome(10.0, 10.0, 10.2, error="HTTP 503: busy")


def test_latency_counts_from_the_planned_time() -> None:
    assert (ONE.ttft_s, ONE.latency_s) == (pytest.approx(1.0), pytest.approx(1.4))
    assert ONE.tpot_s == pytest.approx(0.1)
    assert ONE.itl_s == [pytest.approx(0.1), pytest.approx(0.3)]
    assert replace(ONE, num_output_tokens=1).tpot_s is None


def test_spreads_are_those_of_the_statistics_module() -> None:
    values = [random.Random(1).expovariate(1.0) for _ in range(997)]
    spread = Spread.of(values)
    assert spread.mean == pytest.approx(statistics.fmean(values) * 1000)
    assert spread.median == pytest.approx(statistics.median(values) * 1000)
    assert spread.std == pytest.approx(statistics.pstdev(values) * 1000)
    assert spread.p99 == pytest.approx(statistics.quantiles(values, n=100, method="inclusive")[98] * 1000)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (100, 4.0), (99, 3.97)])
def test_percentiles_lie_between_neighbours(percent: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(expected)
    assert percentile([7.0], percent) == 7.0


@pytest.mark.parametrize(
    ("goal", "num_good"),
    [
        (Goal(ttft_s=1.01), 1),
        (Goal(ttft_s=0.99), 0),
        (Goal(ttft_s=2.0, tpot_s=0.09), 0),
        (Goal(latency_s=1.41, tpot_s=0.11), 1),
        (None, None),
    ],
)
def test_goodput_counts_what_meets_every_goal(goal: Goal | None, num_good: int | None) -> None:
    summary = summarize([ONE, FAILED], 10.0, goal)
    assert (summary.num_good, summary.num_completed, summary.num_failed) == (num_good, 1, 1)


def test_a_run_is_summarized_over_its_whole_time() -> None:
    summary = summarize([ONE, FAILED], 9.5, Goal(ttft_s=2.0))
    assert summary.duration_s == pytest.approx(2.0)
    assert (summary.request_throughput, summary.output_throughput) == (pytest.approx(0.5), pytest.approx(2.5))
    assert (summary.total_token_throughput, summary.request_goodput) == (pytest.approx(52.5), pytest.approx(0.5))
    assert summary.send_delay.mean == pytest.approx(250.0)


def test_the_report_has_the_lines_that_tools_look_for() -> None:
    lines = list(lines_of(summarize([ONE, FAILED], 9.5, Goal(ttft_s=2.0)), 4.0, 8))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     1",
        "Failed requests:                         1",
        "Request rate configured (RPS):           4.00",
        "Benchmark duration (s):                  2.00",
        "Total generated tokens:                  5",
        "Request goodput (req/s):                 0.50",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          1000.00",
        "-----Time per Output Token (excl. 1st token)------",
        "P99 TPOT (ms):                           100.00",
        "---------------Inter-token Latency----------------",
        "Median ITL (ms):                         200.00",
    ):
        assert line in lines, line


def test_nothing_at_all_is_still_a_report() -> None:
    summary = summarize([], 1.0, None)
    assert summary.request_throughput == 0.0
    assert "Mean TTFT (ms):                          0.00" in lines_of(summary, None, 1)


def test_the_result_file_has_summary_and_requests() -> None:
    result = as_json(summarize([ONE, FAILED], 9.5, None), [ONE, FAILED], 9.5, {"model_id": "m"})
    assert (result["model_id"], result["completed"], result["p99_ttft_ms"]) == ("m", 1, pytest.approx(1000.0))
    assert result["requests"][0]["ttft"] == 1.0
    assert result["requests"][0]["planned"] == 0.5
    assert result["requests"][1] | {"ttft": None, "error": "HTTP 503: busy"} == result["requests"][1]


def test_errors_are_counted() -> None:
    other = replace(FAILED, error="timeout")
    assert errors_of([FAILED, other, ONE, FAILED]) == ["2 x HTTP 503: busy", "1 x timeout"]


def test_requests_in_flight_are_counted_from_when_they_were_planned() -> None:
    assert in_flight([ONE, replace(ONE, planned_s=10.2, ended_s=10.9)], 10.0) == [
        (0.0, 1.0), (pytest.approx(0.2), 2.0), (pytest.approx(0.9), 1.0), (1.5, 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize("outcomes", [[], [FAILED], [ONE, FAILED], [ONE] * 5000])
def test_the_plot_is_a_well_formed_picture_of_bounded_size(outcomes: list[Outcome]) -> None:
    picture = svg_of(outcomes, 10.0, "<model> & more")
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(picture) < 400_000
    assert ("nan" in picture, "inf" in picture.replace("in flight", "")) == (False, False)


def test_thinning_keeps_the_last_point() -> None:
    points = [(float(idx), 0.0) for idx in range(10_001)]
    assert len(thinned(points)) <= 2001
    assert thinned(points)[-1] == points[-1]
    assert thinned([]) == []
