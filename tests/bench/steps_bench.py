"""Where a decode step at batch 32 goes: the core's bookkeeping and schedule, inputs, model, sampling, messages.

The real core, runner and message conversion, without threads and network. One thread by processor time, which other
programs on the machine disturb little, two by the wall clock.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from common.checkpoint import open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.engine.contract.executor import Runner, StepFinished
from common.engine.devices.cpu.device import cpu_dtype
from common.engine.executor import runner as runner_module
from common.engine.kv.block_pool import BlockPool
from common.engine.model.decoder import Decoder
from common.engine.scheduling.block_tables import PoolGroup
from common.values.request import SamplingParams
from common.wire.convert import worker_message_to_pb
from common.worker.events import RunStep, SendToRouter
from tests.bench.engine_bench import BLOCK_SIZE, CONTEXT, NUM_BLOCKS, load_runner
from tests.core_bench import tokens
from tests.decode_worker.harness import Bench, job

BATCH = 32
NUM_STEPS = 24
PHASES = ("schedule", "build inputs", "model", "sample", "messages")


class _Timed(defaultdict[str, list[float]]):
    """Seconds of each phase, by a clock: processor time for one thread, time on the wall for two, which may wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(list)
        self.clock = clock


def run() -> list[dict[str, Any]]:
    runner = load_runner(open_checkpoint(fetch_demo_model(print)), cpu_dtype("auto"))
    rows = []
    for num_threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        torch.set_num_threads(num_threads)
        for kind, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            times = _measure(runner, SamplingParams(seed=1, max_tokens=NUM_STEPS + 8, temperature=temperature), clock)
            rows += _rows(
                f"{kind}, {num_threads} thread{'s' * (num_threads > 1)}",
                {phase: statistics.median(times[phase]) for phase in PHASES},
            )
    return rows


def _measure(runner: Runner, params: SamplingParams, clock: Callable[[], float]) -> _Timed:
    bench = _started(params)
    times = _Timed(clock)
    plan = bench.plan
    assert plan is not None
    with _instrumented(times):
        for _ in range(NUM_STEPS):
            result = runner.run(plan)
            with _phase(times, "schedule"):
                effects = bench.core.handle(StepFinished(result), bench.now_s)
            with _phase(times, "messages"):
                sent = [effect.message for effect in effects if isinstance(effect, SendToRouter)]
                for message in sent:
                    worker_message_to_pb(message).SerializeToString()
            assert sent, "no tokens went out"
            (plan,) = (effect.plan for effect in effects if isinstance(effect, RunStep))
            assert len(plan.sequences) == BATCH
    return times


def _started(params: SamplingParams) -> Bench:
    """A core with BATCH running sequences of CONTEXT tokens."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    bench = Bench(budget=512, max_num_seqs=BATCH, max_num_waiting=BATCH, groups=[PoolGroup(pool)])
    for number in range(BATCH):
        bench.start(job(f"r{number}", tokens(CONTEXT, first=1000 * number), sampling=params))
    while bench.plan is not None and len(bench.plan.sequences) < BATCH:
        bench.step()
    return bench


@contextmanager
def _instrumented(times: _Timed) -> Iterator[None]:
    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            with _phase(times, phase):
                return call(*args, **kwargs)

        return run_timed

    with (
        patch.object(runner_module, "build_batches", timed("build inputs", runner_module.build_batches)),
        patch.object(runner_module, "_sample", timed("sample", runner_module._sample)),
        patch.object(Decoder, "forward", timed("model", Decoder.forward)),
    ):
        yield


@contextmanager
def _phase(times: _Timed, phase: str) -> Iterator[None]:
    started_s = times.clock()
    yield
    times[phase].append(times.clock() - started_s)


def _rows(kind: str, seconds: dict[str, float]) -> list[dict[str, Any]]:
    total_s = sum(seconds.values())
    rows = [_row(f"{kind}, {phase}", "ms", 1000 * value) for phase, value in seconds.items()]
    overhead = 100 * (total_s - seconds["model"]) / total_s
    return [*rows, _row(f"{kind}, not in the model", "% of the step", overhead)]


def _row(metric: str, unit: str, value: float) -> dict[str, Any]:
    name = f"step at batch {BATCH}, {metric}"
    return {"metric": name, "unit": unit, "ours": value, "peers": {}, "floor": None, "better": "lower"}
