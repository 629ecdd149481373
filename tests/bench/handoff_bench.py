"""The handoff: the link beside raw gloo, then real workers at three prompt lengths."""

import asyncio
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import grpc

from common.checkpoint.demo_model import fetch_demo_model
from common.wire.pb import generation_pb2, generation_pb2_grpc
from tests.bench import link_bench
from tests.cluster.cluster import running_cluster

PROMPTS = (128, 1024, 4096)
ROUNDS = 9


def run() -> list[dict[str, Any]]:
    return [*link_bench.run(), *_cluster_rows()]


def _cluster_rows() -> list[dict[str, Any]]:
    with running_cluster(fetch_demo_model(print), "--local-prefill-max-tokens", "0") as cluster:
        measured = asyncio.run(_measure(cluster.grpc))
        cluster.wait_until_idle()
    rows = []
    for num_tokens, timings in measured.items():
        for metric, unit, value in _figures(timings):
            name = f"handoff of {num_tokens} tokens, {metric}"
            rows.append({"metric": name, "unit": unit, "ours": value, "peers": {}, "floor": None, "better": "lower"})
    return rows


def _figures(requests: list[tuple[generation_pb2.RequestTimings, float]]) -> list[tuple[str, str, float]]:
    timings = [timings for timings, _ in requests]
    transfer_s = statistics.median(_seconds(each.kv_transfer) for each in timings)
    exposed_s = statistics.median(_exposed_s(each) for each in timings)
    handover_s = statistics.median(handover_s for _, handover_s in requests)
    started_s = statistics.median(_exposed_s(each) + _seconds(each.decode_queue) for each in timings)
    return [
        ("bytes", "MB", timings[0].kv_bytes / 1e6),
        ("transfer", "ms", 1000 * transfer_s),
        ("exposed", "% of the transfer", 100 * exposed_s / transfer_s),
        ("exposed", "ms", 1000 * exposed_s),
        ("last layer computed to first decode step", "ms", 1000 * started_s),
        ("first token to second, less a usual gap", "ms", 1000 * handover_s),
    ]


def _exposed_s(timings: generation_pb2.RequestTimings) -> float:
    return _seconds(timings.kv_transfer) - _seconds(timings.kv_transfer_overlapped)


async def _measure(address: str) -> dict[int, list[tuple[generation_pb2.RequestTimings, float]]]:
    measured: dict[int, list[tuple[generation_pb2.RequestTimings, float]]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for num_tokens in PROMPTS:
            num_rounds = ROUNDS if num_tokens < 4096 else 3
            tries = [await _request(stub, num_tokens, seed) for seed in range(num_rounds + 1)]
            measured[num_tokens] = tries[1:]
    return measured


async def _request(
    stub: generation_pb2_grpc.GenerationServiceStub, num_tokens: int, seed: int
) -> tuple[generation_pb2.RequestTimings, float]:
    """Of one request whose prompt is not cached: its timings, and how much longer than the later gaps between
    tokens the first one is. The first token comes from the prefill worker, the second from the decode worker's first
    step, so this is what the handoff costs a client.
    """
    token_ids = random.Random(num_tokens + seed).choices(range(100, 40_000), k=num_tokens)
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=token_ids),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stop=generation_pb2.StopConditions(max_tokens=8, ignore_eos=True),
        output=generation_pb2.OutputOptions(return_timings=True),
        stream=True,
    )
    timings, arrivals = generation_pb2.RequestTimings(), []
    async for response in stub.Generate(request):
        if response.HasField("chunk"):
            arrivals.append(time.perf_counter())
        if response.HasField("finished"):
            timings = response.finished.timings
    gaps = [after - before for before, after in pairwise(arrivals)]
    return timings, gaps[0] - statistics.median(gaps[1:])


def _seconds(duration: Any) -> float:  # a protobuf Duration
    return float(duration.seconds) + float(duration.nanos) / 1e9
