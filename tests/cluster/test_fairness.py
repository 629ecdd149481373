"""One tenant's flood on a real cluster: another tenant's short prompts go before what waits, at little cost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.two_tenants import FLOOD, OTHER, two_tenants

NUM_FLOOD, NUM_OTHER = 80, 5


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Few sequences at a time, so that a flood has to wait whatever the machine."""
    with (
        two_tenants(tmp_path_factory.mktemp("keys")) as router,
        running_cluster(tiny_model, config={"router": router, "decode_worker": {"max_num_seqs": 2}}) as started,
    ):
        yield started


async def queued_ms(client: httpx.AsyncClient, key: str, first_id: int, num_tokens: int, max_tokens: int) -> float:
    """How long an answer's request waited in the queues of workers: their own clocks, whatever else runs here."""
    prompt = [5 + (first_id + idx * 7) % 90 for idx in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_timings": True}
    reply = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    metrics = reply.json()["metrics"]
    return float(metrics["queue_time_ms"] + metrics["decode_queue_ms"])


async def measure_queues(url: str) -> None:
    limits = httpx.Limits(max_connections=NUM_FLOOD + 1)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        flood = [asyncio.create_task(queued_ms(client, FLOOD, idx, 40, 200)) for idx in range(NUM_FLOOD)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        others_ms = mean([await queued_ms(client, OTHER, idx, 20, 2) for idx in range(NUM_OTHER)])
        flood_ms = mean(await asyncio.gather(*flood))
    print(f"in queues: {others_ms:.0f} ms, and of the flood {flood_ms:.0f} ms")
    assert others_ms < flood_ms / 5


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_flood_of_one_tenant_does_not_hold_up_anothers_short_prompts(cluster: Cluster) -> None:
    """1. a flood that has to wait; 2. another's requests, one by one: they wait for a place, not for the flood."""
    asyncio.run(measure_queues(cluster.url))
