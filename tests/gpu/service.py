"""The whole service on one GPU: a prefill and a decode worker share it, KV goes over pinned staging and gloo."""

import asyncio
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.checkpoint.demo_model import fetch_demo_model
from tests.cluster.cluster import running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong
from tests.gpu.report import Measurement, Report
from tests.tiny_model import write_tiny_model

DISAGGREGATED = ("--local-prefill-max-tokens", "0")
KV_CACHE_DTYPES = ("auto", "int8")
# Loads of the measured run: at once, prompt tokens, output tokens.
AT_ONCE, PROMPT_LEN, OUTPUT_LEN, NUM_REQUESTS = 16, 180, 64, 64


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one stream: time to the first token, then the gaps between tokens."""

    ttft_s: float
    gaps_s: tuple[float, ...]


def check_service(report: Report) -> None:
    """Every token that of one process in float32, on the GPU's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "tiny")
        report.check("service on one GPU", exactness_error(path, "triton", random_cases(16, seed=8)))


def measure_service(report: Report) -> None:
    """The demo model in bfloat16, for each kind of cache."""
    model = fetch_demo_model(print)
    load = Load(NUM_REQUESTS, AT_ONCE, PROMPT_LEN, OUTPUT_LEN)
    for kv_cache_dtype in KV_CACHE_DTYPES:
        options = ("--attention", "triton", "--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype)
        measure(report, f"service, KV {kv_cache_dtype}", model, options, load)


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests, so many at once, of so many tokens in and out."""

    num_requests: int
    at_once: int
    prompt_len: int
    output_len: int

    def cases(self) -> list[Case]:
        """Prompts that share no prefix."""
        tokens = itertools.cycle(range(3, 200))
        prompts = [tuple(itertools.islice(tokens, self.prompt_len + 1)) for _ in range(self.num_requests)]
        return [Case(prompt, seed=idx, max_tokens=self.output_len) for idx, prompt in enumerate(prompts)]


def exactness_error(model: Path, attention: str, cases: list[Case]) -> str | None:
    """What is wrong with the answers of a cluster, or None."""
    options = (*DISAGGREGATED, "--dtype", "float32", "--attention", attention)
    with running_cluster(model, *options) as cluster:
        answers = asyncio.run(run_all(cluster.url, model.name, cases))
    faults = wrong(model, cases, answers)
    return f"{len(faults)} of {len(cases)}, first: {faults[0][:300]}" if faults else None


def measure(report: Report, name: str, model: Path, options: tuple[str, ...], load: Load) -> None:
    """Tokens per second, TTFT and TPOT under a load, after a warm-up of the same shape."""
    with running_cluster(model, *DISAGGREGATED, *options) as cluster:
        served = model.stem if model.is_file() else model.name
        asyncio.run(_timings(cluster.url, served, load.cases()[: load.at_once], load.at_once))
        started_s = time.monotonic()
        timings = asyncio.run(_timings(cluster.url, served, load.cases(), load.at_once))
        duration_s = time.monotonic() - started_s
    for measurement in _measurements(name, timings, duration_s):
        report.measure(measurement)


def _measurements(name: str, timings: list[Timing], duration_s: float) -> list[Measurement]:
    ttfts_ms = sorted(1e3 * timing.ttft_s for timing in timings)
    gaps_ms = sorted(1e3 * gap for timing in timings for gap in timing.gaps_s)
    num_tokens = len(gaps_ms) + len(timings)
    return [
        Measurement(f"{name}, output", "tok/s", num_tokens / duration_s, {}, None),
        Measurement(f"{name}, TTFT p50", "ms", statistics.median(ttfts_ms), {}, None, "lower"),
        Measurement(f"{name}, gap p50", "ms", statistics.median(gaps_ms), {}, None, "lower"),
        Measurement(f"{name}, gap p99", "ms", gaps_ms[int(0.99 * (len(gaps_ms) - 1))], {}, None, "lower"),
    ]


async def _timings(url: str, model: str, cases: list[Case], at_once: int) -> list[Timing]:
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=at_once)) as client:

        async def one(case: Case) -> Timing:
            async with slots:
                return await _timing(client, url, case.body(model))

        return list(await asyncio.gather(*(one(case) for case in cases)))


async def _timing(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> Timing:
    """A chunk of n tokens counts as one gap and n - 1 of nothing, as a client sees it."""
    marks = [time.monotonic()]
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                marks += [time.monotonic()] * sum(len(part.get("token_ids") or []) for part in chunk["choices"])
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    assert gaps, "a stream without a token"
    return Timing(gaps[0], tuple(gaps[1:]))
