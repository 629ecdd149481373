"""How soon a worker does useful work in another role, beside a worker that is started anew, in one cluster and one run.

Under a steady load of short requests, 1+2 workers: from asking for other sizes to the first token that the new worker
of the pool had part in. In turn: decode to prefill, prefill to decode, and one more decode worker from a cold start.

    python -m tests.bench.role_change [--rounds 5]
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.checkpoint.demo_model import fetch_demo_model
from tests.cluster.cluster import Cluster, running_cluster

ROUNDS = 5
NUM_CLIENTS = 3
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 12
LIMIT_S = 120.0
OPTIONS = ("--local-prefill-max-tokens", "0")

# What is asked for, from which sizes, and the pool whose new member is waited for.
STEPS = (
    ("decode to prefill", (2, 1), "prefill"),
    ("prefill to decode", (1, 2), "decode"),
    ("cold start, decode", (1, 3), "decode"),
)


@dataclass
class Load:
    """Clients that ask one request after another. `served`: when each worker last had part in a first token."""

    url: str
    model: str
    served: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_requests: int = 0
    num_failed: int = 0

    async def run(self, client: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            body: dict[str, Any] = {"model": self.model, "prompt": rng.choices(range(100, 40_000), k=PROMPT_TOKENS)}
            body |= {"max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
            try:
                await self._ask(client, body)
            except (httpx.HTTPError, AssertionError):
                self.num_failed += 1
            self.num_requests += 1

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        is_done = False
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            workers = [reply.headers[f"x-pdserve-{role}-worker"] for role in ("prefill", "decode")]
            async for line in reply.aiter_lines():
                assert '"error"' not in line
                if line.startswith("data: {") and workers:
                    for worker in workers:
                        self.served[worker].append(time.monotonic())
                    workers = []
                is_done = is_done or line == "data: [DONE]"
        assert is_done


@asynccontextmanager
async def steady_load(cluster: Cluster, model: str) -> AsyncIterator[Load]:
    load = Load(cluster.url, model)
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        tasks = [asyncio.create_task(load.run(client, seed)) for seed in range(NUM_CLIENTS)]
        try:
            yield load
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure(cluster: Cluster, model: str, num_rounds: int) -> tuple[dict[str, list[float]], Load]:
    """Seconds of each step, by its name."""
    took: dict[str, list[float]] = defaultdict(list)
    async with steady_load(cluster, model) as load:
        await asyncio.sleep(3.0)
        for _ in range(num_rounds):
            for name, sizes, role in STEPS:
                took[name].append(await _first_work_s(cluster, load, sizes, role))
                await asyncio.to_thread(cluster.wait_for_pools, *sizes)
            await _set_sizes(cluster, 1, 2)
            await asyncio.to_thread(cluster.wait_for_pools, 1, 2)
            await asyncio.sleep(1.0)
    return took, load


async def _first_work_s(cluster: Cluster, load: Load, sizes: tuple[int, int], role: str) -> float:
    """From asking to the first token of the worker that was not in the pool before."""
    before = {worker["worker_id"] for worker in await asyncio.to_thread(cluster.workers, role)}
    asked_s = time.monotonic()
    await _set_sizes(cluster, *sizes)
    while time.monotonic() < asked_s + LIMIT_S:
        for worker_id, times in load.served.items():
            new = [at_s for at_s in times if at_s > asked_s]
            if worker_id.startswith(role) and worker_id not in before and new:
                return new[0] - asked_s
        await asyncio.sleep(0.005)
    raise AssertionError(f"no new {role} worker served anything")


async def _set_sizes(cluster: Cluster, prefill: int, decode: int) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{cluster.url}/admin/v1/pools", json={"prefill": prefill, "decode": decode})
        reply.raise_for_status()


def run(num_rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Rows of `make bench`: a role change, the cold start as its peer."""
    with running_cluster(fetch_demo_model(print), *OPTIONS, prefill=1, decode=2) as cluster:
        model = cluster.get("/v1/models")["data"][0]["id"]
        took, load = asyncio.run(measure(cluster, model, num_rounds))
        pools = cluster.get("/admin/v1/state")["pools"]
    assert all(pool["num_crashes"] == 0 for pool in pools.values()), pools
    for name, times in took.items():
        print(f"{name:<22} {' '.join(f'{took_s:6.2f}' for took_s in times)}")
    print(f"{load.num_requests} requests, {load.num_failed} failed")
    cold_s = statistics.median(took["cold start, decode"])
    return [
        _row(f"role change, {name}, to the first token", statistics.median(took[name]), cold_s)
        for name in ("decode to prefill", "prefill to decode")
    ] + [{**_row("role change, failed requests", load.num_failed, None), "unit": f"of {load.num_requests}"}]


def _row(metric: str, value: float, cold_s: float | None) -> dict[str, Any]:
    peers = {} if cold_s is None else {"cold start": cold_s}
    return {"metric": metric, "unit": "s", "ours": value, "peers": peers, "floor": None, "better": "lower"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for row in run(parser.parse_args().rounds):
        peers = ", ".join(f"{name} {value:.2f}" for name, value in row["peers"].items())
        print(f"{row['metric']:<60} {row['ours']:.2f} {row['unit']}  {peers}")


if __name__ == "__main__":
    main()
