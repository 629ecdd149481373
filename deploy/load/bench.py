"""The whole of `pdserve bench`: find out what is served, make the plan, run it, print and write what came of it."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from deploy.load.http_client import Endpoint, HttpFailed
from deploy.load.openai_client import Target, served_model, vocabulary_of
from deploy.load.plan import PlannedRequest, Shape, bounded, replayed, synthetic
from deploy.load.plot import svg_of
from deploy.load.prompts import WORDS, Prompts
from deploy.load.report import as_json, errors_of, lines_of
from deploy.load.results import Goal, summarize
from deploy.load.run import Progress, Run
from deploy.load.traces import read_trace

_GOAL_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "latency_s"}


class BenchFailed(Exception):
    """Nothing could be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line asked for."""

    url: str
    model: str = ""
    api_key: str = ""
    is_chat: bool = False
    dataset: str = "random"
    trace: Path | None = None
    num_requests: int = 100
    max_time_s: float | None = None
    rate_per_s: float = float("inf")
    shape: Shape = field(default_factory=lambda: Shape(256, 64))
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_concurrency: int = 1000
    timeout_s: float = 600.0
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    goal: Goal | None = None
    result: Path | None = None
    plot: Path | None = None
    as_json: bool = False


def run_bench(options: BenchOptions) -> int:
    """0 when every request succeeded, 1 when some did not. Raises BenchFailed when none could be sent."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))
    except HttpFailed as error:
        raise BenchFailed(f"{options.url}: {error}") from error


def goal_of(texts: list[str]) -> Goal | None:
    """`["ttft:500", "tpot:50"]` in milliseconds. Raises ValueError naming what is wrong."""
    values: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        if name not in _GOAL_FIELDS:
            raise ValueError(f"expected {', '.join(_GOAL_FIELDS)} as NAME:MILLISECONDS, got {text!r}")
        values[_GOAL_FIELDS[name]] = float(number) / 1000
    return Goal(**values) if values else None


def plan_of(options: BenchOptions) -> list[PlannedRequest]:
    """What is to be sent. Raises InvalidTrace."""
    if options.trace is not None:
        plan = replayed(read_trace(options.trace, options.dataset), options.time_scale, options.length_scale)
    else:
        rng = random.Random(options.seed)
        plan = synthetic(options.shape, options.num_requests, options.rate_per_s, rng)
    plan = bounded(plan, options.num_requests, options.max_time_s)
    if not plan:
        raise BenchFailed("the plan has no request")
    return plan


async def _run(options: BenchOptions) -> int:
    plan = plan_of(options)
    endpoint = Endpoint.of(options.url, options.api_key)
    model = options.model or await served_model(endpoint)
    vocabulary = None if options.is_chat else await vocabulary_of(endpoint, model)
    target = Target(
        endpoint,
        model,
        is_chat=options.is_chat,
        takes_token_ids=vocabulary is not None,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        timeout_s=options.timeout_s,
    )
    run = Run(target, Prompts(vocabulary or range(len(WORDS)), options.seed), options.max_concurrency)
    await run.send(plan, _show_progress)
    return _finish(options, run, _about(options, target, plan))


def _finish(options: BenchOptions, run: Run, about: Mapping[str, object]) -> int:
    summary = summarize(run.outcomes, run.started_s, options.goal)
    result = as_json(summary, run.outcomes, run.started_s, about)
    if options.as_json:
        print(json.dumps(result))
    else:
        rate = None if options.trace is not None else options.rate_per_s
        print("\n".join(lines_of(summary, rate, options.max_concurrency)))
    for line in errors_of(run.outcomes):
        print(f"failed: {line}", file=sys.stderr)
    if options.result is not None:
        options.result.write_text(json.dumps(result))
    if options.plot is not None:
        options.plot.write_text(
            svg_of(run.outcomes, run.started_s, f"{about['model_id']}, {len(run.outcomes)} requests")
        )
    return 0 if summary.num_failed == 0 else 1


def _about(options: BenchOptions, target: Target, plan: list[PlannedRequest]) -> dict[str, object]:
    """What was run, for readers of the result file; no key."""
    rate = options.rate_per_s
    return {
        "date": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "endpoint": options.url,
        "backend": "openai-chat" if options.is_chat else "openai",
        "model_id": target.model,
        "dataset": options.dataset,
        "trace": str(options.trace or ""),
        "prompt_form": "token ids" if target.takes_token_ids and not options.is_chat else "words",
        "num_prompts": len(plan),
        "planned_input_tokens": sum(request.num_input_tokens for request in plan),
        "request_rate": "inf" if rate == float("inf") else rate,
        "max_concurrency": options.max_concurrency,
        "shape": asdict(options.shape) if options.trace is None else None,
        "time_scale": options.time_scale,
        "length_scale": options.length_scale,
        "goal": asdict(options.goal) if options.goal is not None else None,
        "seed": options.seed,
    }


def _show_progress(progress: Progress) -> None:
    is_terminal = sys.stderr.isatty()
    is_over = progress.num_done == progress.num_planned
    text = (
        f"{progress.elapsed_s:6.1f} s: {progress.num_sent} of {progress.num_planned} sent, "
        f"{progress.num_done} done, {progress.num_failed} failed"
    )
    if not is_terminal:
        print(text, file=sys.stderr, flush=True)
        return
    print(f"\r{text}", end="\n" if is_over else "", file=sys.stderr, flush=True)
