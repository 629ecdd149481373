"""One cluster of two prefill and two decode workers, and what must hold of any: exact answers while workers are
drained, scaled and killed, clients leave and Redis dies; what operators see of it; and no prompt anywhere.
Every test leaves it whole and idle, with all blocks accounted for, which is checked after each.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.calls import check_calls, tool_cases
from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Asked, Case, random_cases, run_all, wrong

LONG = Case(tuple(range(3, 103)), seed=11, max_tokens=1900)


@pytest.fixture(scope="module")
def pools(tiny_model: Path) -> Iterator[Cluster]:
    """Blocks of different sizes on both sides; every prompt is handed off."""
    config = {"prefill_worker": {"block_size": 16}, "decode_worker": {"block_size": 32}}
    config["router"] = {"pair_grace_s": 60}  # as long as a busy machine needs to replace a worker
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
    with running_cluster(tiny_model, *options, prefill=2, decode=2, config=config) as cluster:
        yield cluster


@pytest.fixture
def cluster(pools: Cluster) -> Iterator[Cluster]:
    yield pools
    pools.wait_for_pools(2, 2)
    pools.audit()


async def test_seeded_sampling_and_four_choices(cluster: Cluster, tiny_model: Path) -> None:
    """1. 40 sampled requests; 2. 10 with n = 4; 3. 10 greedy ones; all at once."""
    cases = random_cases(40, seed=1) + random_cases(10, seed=2, num_choices=4) + random_cases(10, 3, temperature=0.0)
    assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []


def test_status_shows_pools_and_blocks(cluster: Cluster) -> None:
    status = cluster.cli("status", "--json")
    assert status.returncode == 0, status.stderr
    workers = json.loads(status.stdout)["workers"]
    assert sorted(worker["role"] for worker in workers) == ["decode", "decode", "prefill", "prefill"]
    readable = cluster.cli("status")
    assert readable.returncode == 0
    assert all(worker["worker_id"] in readable.stdout for worker in workers)


def test_generate_streams_text_and_then_the_waterfall(cluster: Cluster) -> None:
    result = cluster.cli("generate", "hello", "--max-tokens", "5")
    assert result.returncode == 0, result.stderr
    for phase in ("route", "queue", "prefill", "transfer", "decode"):
        assert phase in result.stdout


def test_no_prompt_text_in_logs_or_metrics(cluster: Cluster) -> None:
    body = {"model": "tiny", "prompt": "CANARY-9c1 is secret", "max_tokens": 4}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(f"{cluster.url}/v1/completions", json={**body, "temperature": -1}, timeout=60).status_code == 400
    assert "CANARY" not in httpx.get(f"{cluster.url}/metrics", timeout=60).text
    assert "CANARY" not in json.dumps(cluster.get("/admin/v1/state"))
    cluster.audit()
    logs = cluster.logs()
    assert "request_finished" in logs
    assert "CANARY" not in logs


async def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    """1. read three chunks of a long stream, close; 2. leave a request that does not stream; 3. all blocks are back."""
    before = _counter(cluster, "pdserve_generation_tokens_total")
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream("POST", f"{cluster.url}/v1/completions", json=LONG.body("tiny")) as reply:
            lines = reply.aiter_lines()
            for _ in range(3):
                await anext(lines)
        body = {**LONG.body("tiny"), "stream": False}
        try:
            await client.post(f"{cluster.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
        except httpx.ReadTimeout:
            pass
    await asyncio.to_thread(cluster.audit)
    generated = _counter(cluster, "pdserve_generation_tokens_total") - before
    assert generated < 2 * LONG.max_tokens, "the streams were generated to the end"


async def test_a_drained_worker_takes_no_new_work_and_is_replaced(cluster: Cluster, tiny_model: Path) -> None:
    victim = cluster.workers("decode")[0]
    drained = await asyncio.to_thread(cluster.cli, "drain", victim["worker_id"])
    assert drained.returncode == 0, drained.stderr
    cases = random_cases(10, seed=31)
    assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
    await asyncio.to_thread(cluster.wait_for_pools, 2, 2)
    assert victim["pid"] not in [worker["pid"] for worker in cluster.workers()]


async def test_scaling_down_and_up_under_load_fails_no_request(cluster: Cluster, tiny_model: Path) -> None:
    """1. load on 2+2; 2. scale to 1+1; 3. scale back to 2+2; 4. every answer of the whole time is exact."""
    stop = asyncio.Event()
    load = asyncio.create_task(_load_until(stop, cluster))
    for size in (1, 2):
        scaled = await asyncio.to_thread(cluster.cli, "scale", f"prefill={size}", f"decode={size}")
        assert scaled.returncode == 0, scaled.stdout + scaled.stderr
        await asyncio.to_thread(cluster.wait_for_pools, size, size)
    stop.set()
    cases, answers = await load
    assert len(cases) >= 20
    assert wrong(tiny_model, cases, answers) == []


async def test_calls_are_those_of_one_process_and_parse(cluster: Cluster, tiny_model: Path) -> None:
    """1. one call and several, several choices; 2. the tokens of one process; 3. every call has its arguments."""
    cases = [*tool_cases(6, seed=11), *tool_cases(2, seed=12, num_choices=3), *tool_cases(3, seed=13, is_single=False)]
    answers = await run_all(cluster.url, "tiny", cases)
    assert await asyncio.to_thread(wrong, tiny_model, cases, answers) == []
    assert check_calls(answers) >= 10


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_under_load_is_not_noticed(cluster: Cluster, tiny_model: Path, role: str) -> None:
    """1. load; 2. kill -9 one worker; 3. no gap, no repeat, the same tokens; 4. the pool is whole again."""
    cases: list[Asked] = [
        *random_cases(45, seed=21, max_tokens=240),
        *random_cases(10, seed=24, max_tokens=240, regex="(one, two, three; ){12,}"),  # drafts are right
        *random_cases(15, seed=20, max_tokens=240, regex='(\\{"k": "[a-z ]{20,40}"\\} ?){4,6}'),
        *tool_cases(15, seed=24),
    ]
    random.Random(1).shuffle(cases)
    victim = cluster.workers(role)[0]["pid"]
    load = asyncio.create_task(run_all(cluster.url, "tiny", cases))
    # Of the 85, 16 at once: prompts keep coming all the time. A prefill of this model is too short to be seen.
    await asyncio.to_thread(cluster.wait_for, lambda state: state["num_running"], bool)
    os.kill(victim, signal.SIGKILL)
    assert not load.done()
    answers = await load
    assert await asyncio.to_thread(wrong, tiny_model, cases, answers) == []
    assert check_calls(answers) >= 10
    await asyncio.to_thread(cluster.wait_for_pools, 2, 2)
    assert victim not in [worker["pid"] for worker in cluster.workers()]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_only_worker_of_a_role_killed_is_a_pause_until_it_is_replaced(
    cluster: Cluster, tiny_model: Path, role: str
) -> None:
    """1. scale to 1+1; 2. load; 3. kill -9 the only worker of a role; 4. the same tokens; 5. scale back to 2+2."""
    cases = random_cases(30, seed=22, max_tokens=240)
    assert (await asyncio.to_thread(cluster.cli, "scale", "prefill=1", "decode=1")).returncode == 0
    await asyncio.to_thread(cluster.wait_for_pools, 1, 1)
    (victim,) = cluster.workers(role)
    load = asyncio.create_task(run_all(cluster.url, "tiny", cases))
    await asyncio.to_thread(cluster.wait_for, lambda state: state["num_running"], bool)
    os.kill(victim["pid"], signal.SIGKILL)
    assert not load.done()
    assert wrong(tiny_model, cases, await load) == []
    assert (await asyncio.to_thread(cluster.cli, "scale", "prefill=2", "decode=2")).returncode == 0


async def test_redis_killed_only_slows_routing(cluster: Cluster, tiny_model: Path) -> None:
    """1. warm; 2. kill -9 the cluster's Redis; 3. requests go on, right, and readiness stays."""
    cases = random_cases(20, seed=22)
    assert wrong(tiny_model, cases[:5], await run_all(cluster.url, "tiny", cases[:5])) == []
    redis = [child for child in psutil.Process(cluster.process.pid).children(recursive=True) if _is_redis(child)]
    assert len(redis) == 1
    redis[0].kill()
    assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
    assert httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200


async def _load_until(stop: asyncio.Event, cluster: Cluster) -> tuple[list[Case], list]:  # type: ignore[type-arg]
    cases, answers, seed = [], [], 100
    while not stop.is_set():
        batch = random_cases(8, seed=seed, max_tokens=80)
        answers += await run_all(cluster.url, "tiny", batch, at_once=4)
        cases += batch
        seed += 1
    return cases, answers


def _is_redis(process: psutil.Process) -> bool:
    try:
        return process.name() in ("redis-server", "valkey-server")
    except psutil.NoSuchProcess:
        return False


def _counter(cluster: Cluster, name: str) -> float:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
