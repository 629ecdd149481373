"""Several routers before the same workers: each knows all, and one that dies takes nothing of the others with it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong
from tests.ports import free_port

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


async def test_two_routers_share_the_workers_and_one_that_is_killed_is_missed_by_its_own_clients_alone(
    tiny_model: Path,
) -> None:
    """1. `up --routers 2`: status and scale through the second; 2. load on the second, a long stream on the first;
    3. kill -9 the first; 4. the second's answers are exact, the first's blocks come back, and it is started again."""
    with running_cluster(tiny_model, "--routers", "2", *DISAGGREGATED, ports=(free_port(1), free_port(1))) as cluster:
        second = Cluster(cluster.process, cluster.http_port + 1, cluster.grpc_port + 1, cluster.log_path)
        routers = await asyncio.to_thread(second_sees_both, second)
        assert {router["http_url"] for router in routers} == {cluster.url, second.url}
        scaled = await asyncio.to_thread(second.cli, "scale", "decode=2")
        assert scaled.returncode == 0, scaled.stderr
        status = await asyncio.to_thread(second.cli, "status")
        assert all(router["router_id"] in status.stdout for router in routers)
        victim = next(router for router in routers if router["http_url"] == cluster.url)
        cases = random_cases(40, seed=61, max_tokens=100)
        long = Case(tuple(range(3, 103)), seed=5, max_tokens=1900, num_choices=8)
        load = asyncio.create_task(run_all(second.url, "tiny", cases, at_once=8))
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{cluster.url}/v1/completions", json=long.body("tiny")) as reply,
        ):
            lines = reply.aiter_lines()
            await anext(lines)
            os.kill(victim["pid"], signal.SIGKILL)
            left = [line async for line in lines_until_broken(lines)]
        assert "data: [DONE]" not in left
        assert wrong(tiny_model, cases, await load) == []
        await asyncio.to_thread(second.audit)
        routers = await asyncio.to_thread(second_sees_both, second, victim["pid"])
        assert {router["http_url"] for router in routers} == {cluster.url, second.url}


def second_sees_both(second: Cluster, dead_pid: int = 0) -> list[dict[str, str | int]]:
    """The routers, once there are two, both ready; what a dead one said last stands until its lease is over."""

    def are_there(routers: list[dict[str, str | int]]) -> bool:
        return [router["is_ready"] and router["pid"] != dead_pid for router in routers] == [True, True]

    return second.wait_for(lambda state: state["routers"], are_there)


async def lines_until_broken(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    with contextlib.suppress(httpx.HTTPError):
        async for line in lines:
            yield line
