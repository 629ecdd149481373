"""The engine beside its peers, by turns in one process: prefill and decode, 1 and 2 threads, bf16 and float32.

One thread is timed by its processor time, which other programs on the machine disturb least; two threads by the wall
clock, because OpenMP's waiting is processor time too.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.checkpoint import Checkpoint, open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.engine.contract.executor import Runner
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.engine.devices.cpu.native.build import SWITCH
from common.engine.loading import load_model
from common.values.config import ModelConfig, Quantization, WorkerConfig
from common.values.request import SamplingParams
from tests.bench.floors import Machine, decode_floor, measure_machine, prefill_floor
from tests.bench.hf_peer import HfPeer, hf_python
from tests.bench.plain_loop import PlainLoop
from tests.caches import planes_of

CONTEXT = 192
BLOCK_SIZE = 16
NUM_BLOCKS = 1100
GREEDY = SamplingParams(seed=1, max_tokens=100, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """`new` tokens of each of `batch` sequences, after CONTEXT cached ones when decoding."""

    kind: str
    batch: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch}" if self.kind == "decode" else f"prefill {self.batch} x {self.new}"


WORKS = [
    *(Work("decode", batch, 1) for batch in (1, 8, 32, 64)),
    *(Work("prefill", batch, 512) for batch in (1, 8)),
]
DTYPES = (torch.bfloat16, torch.float32)


def run(
    with_hf: bool = False, dtypes: Sequence[torch.dtype] = DTYPES, threads: Sequence[int] = (1, 2)
) -> list[dict[str, Any]]:
    """All figures by default."""
    checkpoint = open_checkpoint(fetch_demo_model(print))
    rows = []
    for dtype in dtypes:
        rows += _measure_dtype(checkpoint, dtype, with_hf, threads)
    return rows


def load_runner(
    checkpoint: Checkpoint, dtype: torch.dtype, *, native: bool = True, quantization: Quantization = "none"
) -> Runner:
    """An engine whose cache holds numbers everywhere."""
    before = os.environ.get(SWITCH, "1")
    os.environ[SWITCH] = before if native else "0"
    config = WorkerConfig(
        role="decode",
        worker_id="bench",
        model=ModelConfig(path=str(checkpoint.path)),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        quantization=quantization,
        attention="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    loaded = load_model(config)
    os.environ[SWITCH] = before
    for plane in planes_of(loaded.cache):
        plane.normal_()
    return loaded.runner


def step_plan(work: Work, params: SamplingParams = GREEDY) -> StepPlan:
    start = CONTEXT if work.kind == "decode" else 0
    width = -(-(start + work.new) // BLOCK_SIZE)
    sequences = [
        ScheduledSequence(
            seq, (17,) * work.new, start, (tuple(range(seq * width, (seq + 1) * width)),), (SampleSpec(0, 3, params),)
        )
        for seq in range(work.batch)
    ]
    return StepPlan(0, tuple(sequences))


def _measure_dtype(
    checkpoint: Checkpoint, dtype: torch.dtype, with_hf: bool, threads: Sequence[int]
) -> list[dict[str, Any]]:
    runners = {"ours": load_runner(checkpoint, dtype), "torch operators": load_runner(checkpoint, dtype, native=False)}
    plain = PlainLoop(checkpoint, dtype)
    rows = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        machine = measure_machine(dtype, _clock(num_threads))
        hf = HfPeer(checkpoint.path, dtype, num_threads) if with_hf and hf_python() is not None else None
        for work in WORKS:
            sides = _sides(work, runners, plain) | ({"transformers": hf.timer(work)} if hf else {})
            seconds = by_turns(sides, num_threads, 2 if work.batch * work.new > 600 else 7)
            rows.append(_row(work, dtype, num_threads, seconds, _floor(work, machine, checkpoint, dtype)))
        if hf:
            hf.close()
    return rows


def _sides(work: Work, runners: Mapping[str, Runner], plain: PlainLoop) -> dict[str, Callable[[], float | None]]:
    """What to call for one round of each side. A call may answer the seconds itself, when it ran elsewhere."""
    plan = step_plan(work)

    def ours(runner: Runner) -> Callable[[], float | None]:
        return lambda: discard(runner.run(plan))

    kv = plain.new_cache(work.batch, CONTEXT + 1) if work.kind == "decode" else None

    def loop() -> float | None:
        return plain.decode(kv) if kv is not None else plain.prefill(work.batch, work.new)

    return {name: ours(runner) for name, runner in runners.items()} | {"plain torch loop": loop}


def discard(_: object) -> None:
    """The side was run here: its caller took the time."""


def by_turns(sides: Mapping[str, Callable[[], float | None]], num_threads: int, num_rounds: int) -> dict[str, float]:
    """Median seconds of each side; the first round warms up, where there are more than two."""
    clock = _clock(num_threads)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, call in sides.items():
            started_s = clock()
            elsewhere_s = call()
            times[name].append(clock() - started_s if elsewhere_s is None else elsewhere_s)
    return {name: statistics.median(values[num_rounds > 2 :]) for name, values in times.items()}


def _clock(num_threads: int) -> Callable[[], float]:
    return time.process_time if num_threads == 1 else time.perf_counter


def _floor(work: Work, machine: Machine, checkpoint: Checkpoint, dtype: torch.dtype) -> float:
    if work.kind == "decode":
        return decode_floor(machine, checkpoint.config, dtype, work.batch, CONTEXT)
    return prefill_floor(machine, checkpoint.config, work.new)


def _row(
    work: Work, dtype: torch.dtype, num_threads: int, seconds: Mapping[str, float], floor: float
) -> dict[str, Any]:
    rates = {name: work.batch * work.new / value for name, value in seconds.items()}
    name = f"{work.name}, {str(dtype).removeprefix('torch.')}, {num_threads} thread{'s' * (num_threads > 1)}"
    peers = {peer: rate for peer, rate in rates.items() if peer != "ours"}
    return {"metric": name, "unit": "tok/s", "ours": rates["ours"], "peers": peers, "floor": floor, "better": "higher"}
