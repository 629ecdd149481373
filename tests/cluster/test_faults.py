"""Faults on a live cluster: workers, Redis and clients die; what is answered is right and nothing is leaked."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
LONG = Case(tuple(range(3, 103)), seed=11, max_tokens=400)


async def test_a_prefill_worker_killed_under_load_is_not_noticed(tiny_model: Path) -> None:
    """1. 2P+1D under load; 2. kill -9 one P; 3. every answer is right; 4. the pool is whole again."""
    await _kill_under_load(tiny_model, "prefill", prefill=2, decode=1)


async def test_a_decode_worker_killed_mid_stream_is_not_noticed(tiny_model: Path) -> None:
    """1. 1P+2D under load; 2. kill -9 one D; 3. no gap, no repeat, same tokens; 4. the pool is whole again."""
    await _kill_under_load(tiny_model, "decode", prefill=1, decode=2)


async def _kill_under_load(model: Path, role: str, prefill: int, decode: int) -> None:
    cases = random_cases(60, seed=21, max_tokens=120)
    with running_cluster(model, *DISAGGREGATED, prefill=prefill, decode=decode) as cluster:
        victim = cluster.workers(role)[0]["pid"]
        load = asyncio.create_task(run_all(cluster.url, "tiny", cases))
        # Of the 60, 16 at once: prompts keep coming all the time. A prefill of this model is too short to be seen.
        await _until(lambda: any(worker["running"] for worker in cluster.workers()))
        os.kill(victim, signal.SIGKILL)
        assert not load.done()
        assert wrong(model, cases, await load) == []
        assert not psutil.pid_exists(victim)
        await asyncio.to_thread(cluster.wait_for_pools, prefill, decode)
        assert victim not in [worker["pid"] for worker in cluster.workers()]


async def test_redis_killed_only_slows_routing(tiny_model: Path) -> None:
    """1. warm; 2. kill -9 the cluster's Redis; 3. requests go on, right, and readiness stays."""
    cases = random_cases(20, seed=22)
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        assert wrong(tiny_model, cases[:5], await run_all(cluster.url, "tiny", cases[:5])) == []
        redis = [child for child in psutil.Process(cluster.process.pid).children(recursive=True) if _is_redis(child)]
        assert len(redis) == 1
        redis[0].kill()
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
        assert httpx.get(f"{cluster.url}/ready").status_code == 200


async def test_a_client_that_leaves_frees_everything(tiny_model: Path) -> None:
    """1. read three chunks of a long stream, close; 2. leave a request that does not stream; 3. all blocks are back."""
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        async with httpx.AsyncClient(timeout=60) as client:
            async with client.stream("POST", f"{cluster.url}/v1/completions", json=LONG.body("tiny")) as reply:
                lines = reply.aiter_lines()
                for _ in range(3):
                    await anext(lines)
            body = {**LONG.body("tiny"), "stream": False}
            try:
                await client.post(f"{cluster.url}/v1/completions", json=body, timeout=0.2)
            except httpx.ReadTimeout:
                pass
        await asyncio.to_thread(cluster.audit)
        generated = _counter(cluster, "pdserve_generation_tokens_total")
        assert generated < 2 * LONG.max_tokens, "the streams were generated to the end"


async def test_more_than_the_queue_holds_is_refused_with_a_hint_and_the_rest_is_right(tiny_model: Path) -> None:
    """1. queue of 4, one sequence at a time; 2. 30 requests at once; 3. each is exact, or 503 with Retry-After."""
    config = {
        "router": {"max_num_queued": 4},
        "decode_worker": {"max_num_seqs": 1},
        "prefill_worker": {"max_num_waiting": 2},
    }
    cases = random_cases(30, seed=23, max_tokens=60)
    with running_cluster(tiny_model, *DISAGGREGATED, config=config) as cluster:
        async with httpx.AsyncClient(timeout=120) as client:
            replies = await asyncio.gather(
                *(client.post(f"{cluster.url}/v1/completions", json=_whole(case)) for case in cases)
            )
        refused = [reply for reply in replies if reply.status_code == 503]
        assert refused, "nothing was refused"
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert {reply.json()["error"]["type"] for reply in refused} == {"server_overloaded"}
        accepted = [(case, reply) for case, reply in zip(cases, replies, strict=True) if reply.status_code == 200]
        assert len(accepted) + len(refused) == 30 and accepted
        for case, reply in accepted:
            assert reply.json()["choices"][0]["token_ids"] == case.expected(tiny_model)[0]


async def test_no_prompt_text_in_logs_or_metrics(tiny_model: Path) -> None:
    with running_cluster(tiny_model, *DISAGGREGATED) as cluster:
        body = {"model": "tiny", "prompt": "CANARY-9c1 is secret", "max_tokens": 4}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{cluster.url}/v1/completions", json={**body, "temperature": -1}).status_code == 400
        assert "CANARY" not in httpx.get(f"{cluster.url}/metrics").text
        assert "CANARY" not in json.dumps(cluster.get("/admin/v1/state"))
        cluster.audit()
        logs = cluster.logs()
        assert "request_finished" in logs
        assert "CANARY" not in logs


def _whole(case: Case) -> dict[str, object]:
    return {**case.body("tiny"), "stream": False}


def _is_redis(process: psutil.Process) -> bool:
    try:
        return process.name() in ("redis-server", "valkey-server")
    except psutil.NoSuchProcess:
        return False


def _counter(cluster: Cluster, name: str) -> float:
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)
