"""Logprobs of prompts are the reference's, however the work is spread, whatever is cached and whoever is killed."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.golden import LOGPROB_TOLERANCE, Golden, load_goldens, pools
from tests.reference_model import load_reference

NUM_GOLDENS = 8  # the shortest
DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


def as_prompt(golden: Golden) -> list[int]:
    """What the reference generated, as a prompt: it said how likely each of those tokens was."""
    return golden.prompt_token_ids + golden.output_token_ids


async def echoed(client: httpx.AsyncClient, cluster: Cluster, token_ids: Sequence[int]) -> dict[str, Any]:
    """The prompt alone, over HTTP: its logprobs, whose cost is that of the whole prompt."""
    body = {"prompt": token_ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await client.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs: dict[str, Any] = answer["choices"][0]["logprobs"]
    return logprobs


def check_golden(golden: Golden, logprobs: Sequence[float | None], best: Sequence[float]) -> None:
    """Greedy: each token of the output was the most likely one."""
    num = len(golden.output_token_ids)
    assert logprobs[-num:] == pytest.approx(golden.logprobs, abs=LOGPROB_TOLERANCE)
    assert best[-num:] == pytest.approx(golden.logprobs, abs=LOGPROB_TOLERANCE)


async def over_grpc(cluster: Cluster, token_ids: list[int], *, is_local: bool) -> list[pb.TokenLogprobs]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        output=pb.OutputOptions(prompt_logprobs=1),
        stop=pb.StopConditions(max_tokens=1),
        routing=pb.RoutingHints(force_colocated=is_local),
    )
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        return [each async for message in stub.Generate(request) for each in message.chunk.prompt_logprobs]


async def test_what_the_reference_generated_is_as_likely_as_it_said(demo_model: Path) -> None:
    """Chunks of 64, blocks of 16 and 8: 1. shipped, cold; 2. shipped, with the prompt cached on both workers, over both
    APIs; 3. computed by the decode worker."""
    goldens = load_goldens()[:NUM_GOLDENS]
    with running_cluster(demo_model, *DISAGGREGATED, config=pools(16, 8, 64)) as cluster:
        async with httpx.AsyncClient(timeout=280) as client:
            for golden in goldens:
                cold = await echoed(client, cluster, as_prompt(golden))
                assert cold["token_logprobs"][0] is None
                best = [max(top.values()) for top in cold["top_logprobs"][1:]]
                check_golden(golden, cold["token_logprobs"], best)
                warm = await echoed(client, cluster, as_prompt(golden))
                for is_local in (False, True):
                    entries = await over_grpc(cluster, as_prompt(golden), is_local=is_local)
                    told = [entry.logprob for entry in entries[1:]]
                    assert told == pytest.approx(cold["token_logprobs"][1:], abs=LOGPROB_TOLERANCE)
                    check_golden(golden, told, [entry.top[0].logprob for entry in entries[1:]])
                assert warm["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=LOGPROB_TOLERANCE)
        records = cluster.get(f"/admin/v1/requests?limit={4 * len(goldens)}")["requests"]
        assert [record["attempts"][-1]["is_local"] for record in records].count(True) == len(goldens)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_while_prompts_are_scored_changes_no_number(tiny_model: Path, role: str) -> None:
    """1. prompts of many chunks, with outputs, at once; 2. kill -9 one worker; 3. every logprob, once, and all text."""
    rng, reference = random.Random(3), load_reference(tiny_model)
    prompts = [[rng.randrange(10, 200) for _ in range(rng.randint(100, 300))] for _ in range(36)]
    with running_cluster(tiny_model, *DISAGGREGATED, prefill=2, decode=2, config=pools(16, 8, 16)) as cluster:
        async with httpx.AsyncClient(timeout=280) as client:
            asked = [asyncio.create_task(_scored(client, cluster, prompt)) for prompt in prompts]
            victim = await asyncio.to_thread(_busy_worker, cluster, role)
            os.kill(victim["pid"], signal.SIGKILL)
            answers = await asyncio.gather(*asked)
        cluster.wait_for_pools(2, 2)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.forward(prompt, reference.new_past()).log_softmax(1)
        choice = answer["choices"][0]
        own = [expected[at, token_id].item() for at, token_id in enumerate(prompt[1:])]
        assert choice["logprobs"]["token_logprobs"][1 : len(prompt)] == pytest.approx(own, abs=LOGPROB_TOLERANCE)
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 8
        ranks = [
            entry[str(token)]["rank"] for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]
        order = expected.argsort(dim=1, descending=True)
        exact = [order[at].tolist().index(token) + 1 for at, token in enumerate(prompt[1:])]
        assert sum(rank != other for rank, other in zip(ranks, exact, strict=True)) <= len(ranks) // 20  # near ties


async def _scored(client: httpx.AsyncClient, cluster: Cluster, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    reply = await client.post(f"{cluster.url}/v1/completions", json={**body, "temperature": 0})
    assert reply.status_code == 200, reply.text
    return reply.json()


def _busy_worker(cluster: Cluster, role: str) -> dict[str, Any]:
    """One that has something to do, as its router sees it."""

    def busy(state: Any) -> list[dict[str, Any]]:
        return [each for each in state["workers"] if each["role"] == role and each["running"] + each["waiting"]]

    found: list[dict[str, Any]] = cluster.wait_for(busy, bool)
    return found[0]
