"""Where should the last few uncached tokens of a prompt be computed? The measurement behind the default of
`local_prefill_max_tokens`.

One cluster, streams running on the decode worker, and prompts of N uncached tokens sent alternately both ways: shipped
from the prefill worker, and prefilled on the decode worker. Prints per N the median time to first token of both, and
the longest token gap that a running stream suffered meanwhile.

    python -m tests.bench.local_prefill [MODEL]
"""

import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from common.checkpoint.demo_model import fetch_demo_model
from common.wire.pb import generation_pb2, generation_pb2_grpc
from tests.cluster.cluster import running_cluster

SIZES = (8, 16, 32, 64, 128, 256)
ROUNDS = 9
NUM_STREAMS = 4


def request(token_ids: list[int], max_tokens: int, *, is_local: bool = False) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=token_ids),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stop=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        routing=generation_pb2.RoutingHints(force_colocated=is_local),
        stream=True,
    )


class Gaps:
    """Times between tokens of the running streams."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run_stream(self, stub: generation_pb2_grpc.GenerationServiceStub, seed: int) -> None:
        while True:
            last_s = time.monotonic()
            async for response in stub.Generate(request(prompt(8, seed), 1000)):
                now_s = time.monotonic()
                if response.HasField("chunk"):
                    self.longest_s = max(self.longest_s, now_s - last_s)
                last_s = now_s


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Tokens that no earlier prompt had."""
    return random.Random(seed).choices(range(100, 40_000), k=num_tokens)


async def first_token_s(stub: generation_pb2_grpc.GenerationServiceStub, size: int, seed: int, is_local: bool) -> float:
    started_s = time.monotonic()
    first_s = 0.0
    async for response in stub.Generate(request(prompt(size, seed), 4, is_local=is_local)):
        if response.HasField("chunk") and not first_s:
            first_s = time.monotonic() - started_s
    return first_s


@asynccontextmanager
async def running_streams(stub: generation_pb2_grpc.GenerationServiceStub) -> AsyncIterator[Gaps]:
    gaps = Gaps()
    tasks = [asyncio.create_task(gaps.run_stream(stub, seed)) for seed in range(NUM_STREAMS)]
    await asyncio.sleep(1.0)
    try:
        yield gaps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        print(f"{'tokens':>7} {'shipped TTFT':>13} {'local TTFT':>11} {'shipped gap':>12} {'local gap':>10}   (ms)")
        async with running_streams(stub) as gaps:
            for size in SIZES:
                times: dict[tuple[str, bool], list[float]] = defaultdict(list)
                for number in range(ROUNDS * 2):
                    is_local = number % 2 == 1
                    gaps.longest_s = 0.0
                    seed = size * 1000 + number
                    times["ttft", is_local].append(await first_token_s(stub, size, seed, is_local))
                    times["gap", is_local].append(gaps.longest_s)
                row = [
                    1000 * statistics.median(times[name, is_local])
                    for name in ("ttft", "gap")
                    for is_local in (False, True)
                ]
                print(f"{size:7} {row[0]:13.1f} {row[1]:11.1f} {row[2]:12.1f} {row[3]:10.1f}")


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch_demo_model(print)
    with running_cluster(model, "--local-prefill-max-tokens", "0") as cluster:
        asyncio.run(measure(cluster.grpc))
        cluster.wait_until_idle()


if __name__ == "__main__":
    main()
