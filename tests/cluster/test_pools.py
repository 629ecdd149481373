"""Pools change size while serving, workers drain, and the commands say what happened."""

import asyncio
import json
from pathlib import Path

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import random_cases, run_all, wrong

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


async def test_scaling_up_and_down_under_load_fails_no_request(tiny_model: Path) -> None:
    """1. load on 1+1; 2. scale to 2+2; 3. scale back to 1+1; 4. every answer of the whole time is exact."""
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        stop = asyncio.Event()
        load = asyncio.create_task(_load_until(stop, cluster))
        await _scale(cluster, "prefill=2", "decode=2")
        await asyncio.to_thread(cluster.wait_for_pools, 2, 2)
        await _scale(cluster, "prefill=1", "decode=1")
        await asyncio.to_thread(cluster.wait_for_pools, 1, 1)
        stop.set()
        cases, answers = await load
        assert len(cases) >= 20
        assert wrong(tiny_model, cases, answers) == []


async def test_a_drained_worker_takes_no_new_work_and_is_replaced(tiny_model: Path) -> None:
    with running_cluster(tiny_model, *DISAGGREGATED, decode=2) as cluster:
        victim = cluster.workers("decode")[0]
        drained = await asyncio.to_thread(cluster.cli, "drain", victim["worker_id"])
        assert drained.returncode == 0, drained.stderr
        cases = random_cases(10, seed=31)
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
        await asyncio.to_thread(cluster.wait_for_pools, 1, 2)
        assert victim["pid"] not in [worker["pid"] for worker in cluster.workers()]


def test_status_shows_pools_and_blocks(tiny_model: Path) -> None:
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        status = cluster.cli("status", "--json")
        assert status.returncode == 0, status.stderr
        workers = json.loads(status.stdout)["workers"]
        assert sorted(worker["role"] for worker in workers) == ["decode", "prefill"]
        readable = cluster.cli("status")
        assert readable.returncode == 0
        assert all(worker["worker_id"] in readable.stdout for worker in workers)


def test_generate_streams_text_and_then_the_waterfall(tiny_model: Path) -> None:
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        result = cluster.cli("generate", "hello", "--max-tokens", "5")
        assert result.returncode == 0, result.stderr
        for phase in ("route", "queue", "prefill", "transfer", "decode"):
            assert phase in result.stdout


async def _load_until(stop: asyncio.Event, cluster: Cluster) -> tuple[list, list]:  # type: ignore[type-arg]
    cases, answers = [], []
    seed = 100
    while not stop.is_set():
        batch = random_cases(8, seed=seed, max_tokens=80)
        answers += await run_all(cluster.url, "tiny", batch, at_once=8)
        cases += batch
        seed += 1
    return cases, answers


async def _scale(cluster: Cluster, *sizes: str) -> None:
    scaled = await asyncio.to_thread(cluster.cli, "scale", *sizes)
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
