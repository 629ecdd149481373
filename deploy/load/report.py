"""A run's summary as the table that people know from vLLM, and as JSON with the names of its result files. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.load.results import Outcome, Spread, Summary

_WIDTH = 50
_SECTIONS = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2EL", "latency"),
)
_MAX_ERRORS = 5


def lines_of(summary: Summary, rate: float | None, max_concurrency: int) -> Iterator[str]:
    """The table. `rate` is None for a trace."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _row("Successful requests:", summary.num_completed)
    yield _row("Failed requests:", summary.num_failed)
    yield _row("Maximum request concurrency:", max_concurrency)
    if rate is not None:
        yield _row("Request rate configured (RPS):", f"{rate:.2f}")
    yield _row("Benchmark duration (s):", f"{summary.duration_s:.2f}")
    yield _row("Total input tokens:", summary.total_input_tokens)
    yield _row("Total generated tokens:", summary.total_output_tokens)
    yield _row("Request throughput (req/s):", f"{summary.request_throughput:.2f}")
    if summary.request_goodput is not None:
        yield _row("Request goodput (req/s):", f"{summary.request_goodput:.2f}")
    yield _row("Output token throughput (tok/s):", f"{summary.output_throughput:.2f}")
    yield _row("Total Token throughput (tok/s):", f"{summary.total_token_throughput:.2f}")
    yield _row("P99 delay of sending (ms):", f"{summary.send_delay.p99:.2f}")
    for title, short, name in _SECTIONS:
        yield from _section(title, short, getattr(summary, name))
    yield "=" * _WIDTH


def errors_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What went wrong, most frequent first."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [f"{count} x {error}" for error, count in ordered[:_MAX_ERRORS]]


def as_json(
    summary: Summary, outcomes: Sequence[Outcome], started_s: float, about: Mapping[str, object]
) -> dict[str, Any]:
    """The result file. `about` is what was run; times of requests are seconds since the start."""
    spreads = {
        f"{statistic}_{name if name != 'latency' else 'e2el'}_ms": getattr(getattr(summary, name), statistic)
        for _, _, name in _SECTIONS
        for statistic in ("mean", "median", "std", "p99")
    }
    return {
        **about,
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "p99_send_delay_ms": summary.send_delay.p99,
        **spreads,
        "requests": [_request(outcome, started_s) for outcome in outcomes],
    }


def _request(outcome: Outcome, started_s: float) -> dict[str, object]:
    has_tokens = bool(outcome.event_s)
    return {
        "planned": round(outcome.planned_s - started_s, 6),
        "sent": round(outcome.sent_s - started_s, 6),
        "ended": round(outcome.ended_s - started_s, 6),
        "input_len": outcome.num_input_tokens,
        "output_len": outcome.num_output_tokens,
        "ttft": round(outcome.ttft_s, 6) if has_tokens else None,
        "itl": [round(gap, 6) for gap in outcome.itl_s],
        "error": outcome.error,
    }


def _section(title: str, short: str, spread: Spread) -> Iterator[str]:
    yield f"{title:-^{_WIDTH}}"
    yield _row(f"Mean {short} (ms):", f"{spread.mean:.2f}")
    yield _row(f"Median {short} (ms):", f"{spread.median:.2f}")
    yield _row(f"P99 {short} (ms):", f"{spread.p99:.2f}")


def _row(name: str, value: object) -> str:
    return f"{name:<40} {value!s:<10}".rstrip()
