"""LoRA adapters in a live cluster: each answer is that of one process with the adapter merged into the weights."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.values.request import SamplingParams
from tests.cluster.cluster import Cluster, running_cluster
from tests.one_process import generate
from tests.tiny_adapter import TinyAdapter, write_adapter, write_merged
from tests.tiny_model import write_tiny_model

PROMPTS = tuple([(seed + 7 * idx) % 250 + 3 for idx in range(length)] for seed, length in enumerate((4, 37, 90)))
NUM_TOKENS = 40
NAMES = ("tiny", "one", "two", "three")  # without an adapter, configured, and loaded while it serves


@dataclass(frozen=True, slots=True)
class World:
    cluster: Cluster
    adapters: dict[str, Path]
    expected: dict[tuple[str, int, int], list[int]]  # by model, prompt, choice


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two adapters fit into a worker, three are served; the decode workers have too few blocks for all at once."""
    folder = tmp_path_factory.mktemp("adapters")
    base = write_tiny_model(folder / "tiny")
    targets = ("q_proj", "v_proj", "down_proj")
    kinds = {
        "one": TinyAdapter(seed=1),
        "two": TinyAdapter(rank=7, seed=2, targets=targets),
        "three": TinyAdapter(seed=3),
    }
    adapters = {name: write_adapter(folder / name, base, kind) for name, kind in kinds.items()}
    models = {name: write_merged(folder / f"m-{name}", base, path) for name, path in adapters.items()} | {"tiny": base}
    expected = {
        (name, number, choice): generate(models[name], prompt, params(), [choice])[0]
        for name in NAMES
        for number, prompt in enumerate(PROMPTS)
        for choice in range(2)
    }
    config = {
        "prefill_worker": {"block_size": 16, "max_num_batched_tokens": 32, "max_loras": 2},
        "decode_worker": {"block_size": 8, "num_blocks": 72, "max_loras": 2},
    }
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "0", "--lora", f"one={adapters['one']}")
    with running_cluster(base, *options, decode=2, config=config) as cluster:
        for name in ("two", "three"):
            body = {"name": name, "path": str(adapters[name])}
            reply = httpx.post(f"{cluster.url}/admin/v1/adapters", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
        yield World(cluster, adapters, expected)


def params() -> SamplingParams:
    return SamplingParams(seed=5, max_tokens=NUM_TOKENS, temperature=1.0)


async def ask(client: httpx.AsyncClient, name: str, number: int, num_choices: int = 2) -> list[list[int]]:
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    body = {"model": name, "prompt": PROMPTS[number], "n": num_choices, "return_token_ids": True} | fields
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == name
    return [choice["token_ids"] for choice in sorted(reply.json()["choices"], key=lambda choice: choice["index"])]


def of(world: World, name: str, number: int) -> list[list[int]]:
    return [world.expected[name, number, choice] for choice in range(2)]


async def test_alone_and_from_cache_each_model_gives_its_own_tokens(world: World) -> None:
    """The same prompts for all: no block that one model left is of use to another."""
    async with httpx.AsyncClient(base_url=world.cluster.url, timeout=280) as client:
        for _ in range(2):
            for name in NAMES:
                for number in range(len(PROMPTS)):
                    assert await ask(client, name, number) == of(world, name, number), (name, number)
    world.cluster.audit()


async def test_all_at_once_with_too_few_blocks_and_too_little_room_for_adapters(world: World) -> None:
    jobs = [(name, number) for _ in range(2) for name in NAMES for number in range(len(PROMPTS))]
    async with httpx.AsyncClient(base_url=world.cluster.url, timeout=280) as client:
        answers = await asyncio.gather(*(ask(client, *job) for job in jobs))
    assert answers == [of(world, *job) for job in jobs]
    world.cluster.audit()


async def test_a_decode_workers_death_changes_no_token(world: World) -> None:
    cluster, num_seen = world.cluster, 0
    pids = {worker["worker_id"]: worker["pid"] for worker in cluster.workers("decode")}
    body = {"model": "two", "prompt": PROMPTS[1], "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    token_ids: list[int] = []
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=280) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
                num_seen += 1
                if num_seen == 3:
                    os.kill(pids[reply.headers["x-pdserve-decode-worker"]], signal.SIGKILL)
    assert token_ids == world.expected["two", 1, 0]
    cluster.wait_for_pools(1, 2)


def test_a_record_names_the_adapter_and_explain_shows_it(world: World) -> None:
    body = {"model": "one", "prompt": PROMPTS[0], "max_tokens": 2}
    answer = httpx.post(f"{world.cluster.url}/v1/completions", json=body, timeout=60).json()
    assert world.cluster.get(f"/admin/v1/requests/{answer['id']}")["adapter"] == "one"
    assert "adapter: one" in world.cluster.cli("explain", answer["id"]).stdout


def test_a_bad_adapter_is_refused_by_its_tensor_and_an_unloaded_one_is_not_found(world: World, tmp_path: Path) -> None:
    url, other = world.cluster.url, write_tiny_model(tmp_path / "other")
    bad = write_adapter(tmp_path / "bad", other, TinyAdapter(rank=3))
    config = bad / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 3', '"r": 5'))
    refused = httpx.post(f"{url}/admin/v1/adapters", json={"name": "bad", "path": str(bad)}, timeout=60)
    assert refused.status_code == 400
    assert "tensor base_model.model.model.layers.0." in refused.json()["error"]["message"]
    assert httpx.delete(f"{url}/admin/v1/adapters/three", timeout=60).status_code == 200
    gone = httpx.post(f"{url}/v1/completions", json={"model": "three", "prompt": "x"}, timeout=60)
    assert gone.status_code == 404
    assert "'tiny', 'one', 'two' are" in gone.json()["error"]["message"]
