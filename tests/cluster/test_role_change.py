"""Workers change their role under load: same process, same weights, every answer exact."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
# Pools of other block sizes and cache sizes: the KV cache is made anew with the role.
SIZES = {"prefill_worker": {"num_blocks": 512}, "decode_worker": {"num_blocks": 640, "block_size": 8}}


async def test_roles_change_there_and_back_under_load_and_no_request_fails(tiny_model: Path) -> None:
    """1. load on 2+1; 2. 1+2 by a role change; 3. 2+1 again; 4. all exact, the same processes, each loaded once;
    5. without load: no prefix that was cached in one role is in the next.
    """
    with running_cluster(tiny_model, *DISAGGREGATED, prefill=2, decode=1, config=SIZES) as cluster:
        before = pids(cluster)
        stop = asyncio.Event()
        load = asyncio.create_task(_load_until(stop, cluster))
        for sizes in ((1, 2), (2, 1)):
            await _scale(cluster, *sizes)
            assert pids(cluster) == before
            await _answers_of(load, cluster, 8)
        stop.set()
        cases, answers = await load
        assert len(cases) >= 40
        assert wrong(tiny_model, cases, answers) == []
        pools = cluster.get("/admin/v1/state")["pools"]
        assert [pools[role]["num_changes"] for role in ("prefill", "decode")] == [1, 1]
        assert [pools[role]["num_crashes"] for role in ("prefill", "decode")] == [0, 0]
        scrapes = [metrics_of(pid) for pid in before]
        assert [scrape["pdserve_model_loads_total"] for scrape in scrapes] == [1.0, 1.0, 1.0]
        changed = [scrape for scrape in scrapes if scrape.get("pdserve_role_changes_total", 0) == 2.0]
        assert len(changed) == 1
        assert changed[0]["pdserve_role_change_seconds_count"] == 2.0
        await _check_caches(cluster, tiny_model)


async def _check_caches(cluster: Cluster, tiny_model: Path) -> None:
    """1. everybody caches prefixes; 2. roles change there and back; 3. whoever did caches none, and all is exact."""
    cases = random_cases(16, seed=77, max_tokens=40)
    assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
    before = {worker["pid"]: worker for worker in cluster.wait_until_idle()}
    assert all(worker["kv_blocks_cached"] for worker in before.values())
    await _scale(cluster, 1, 2)
    await _scale(cluster, 2, 1)
    after = {worker["pid"]: worker for worker in cluster.workers()}
    changed = [pid for pid in after if after[pid]["incarnation"] != before[pid]["incarnation"]]
    assert [after[pid]["kv_blocks_cached"] for pid in changed] == [0]
    assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []


def pids(cluster: Cluster) -> list[int]:
    return sorted(worker["pid"] for worker in cluster.workers())


def metrics_of(pid: int) -> dict[str, float]:
    """Sums over labels of what a worker's own /metrics says; it is on one of the ports that the process listens on."""
    for listening in psutil.Process(pid).net_connections("tcp"):
        if listening.status != psutil.CONN_LISTEN:
            continue
        try:
            text = httpx.get(f"http://127.0.0.1:{listening.laddr.port}/metrics", timeout=10).text
        except httpx.HTTPError:
            continue
        if "pdserve_model_loads_total" in text:
            return _sums(text)
    raise AssertionError(f"process {pid} serves no metrics")


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.partition("{")[0], float(line.rpartition(" ")[2])
            sums[name] = sums.get(name, 0.0) + value
    return sums


async def _load_until(stop: asyncio.Event, cluster: Cluster) -> tuple[list[Case], list[Any]]:
    cases: list[Case] = []
    answers: list[Any] = []
    while not stop.is_set():
        batch = random_cases(8, seed=900 + len(cases), max_tokens=60)
        answers += await run_all(cluster.url, "tiny", batch, at_once=8)
        cases += batch
    return cases, answers


async def _answers_of(load: "asyncio.Task[Any]", cluster: Cluster, count: int) -> None:
    """Wait until so many more requests were answered by the pools as they are now."""
    before = await _num_finished(cluster)
    while not load.done() and await _num_finished(cluster) < before + count:
        await asyncio.sleep(0.05)


async def _num_finished(cluster: Cluster) -> float:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{cluster.url}/metrics")).text
    return _sums(text).get("pdserve_requests_total", 0.0)


async def _scale(cluster: Cluster, prefill: int, decode: int) -> None:
    scaled = await asyncio.to_thread(cluster.cli, "scale", "--prefill", str(prefill), "--decode", str(decode))
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
