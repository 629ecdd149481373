"""What several ranks on one machine cost beside their products: a plan on its way to the others, a sum over them."""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from common.engine.contract.plan import StepPlan
from common.engine.executor.rank_channel import Step, decode, encode_step
from common.engine.loading import LoadedModel, load_model
from common.values.config import ModelConfig, WorkerConfig
from tests.bench.engine_bench import Work, step_plan
from tests.ranks import new_collectives, on_ranks
from tests.tiny_model import write_tiny_model

REPEATS = 200


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, closing(_load(write_tiny_model(Path(folder) / "tiny"))) as two:
        return [_encoding_row(), _round_trip_row(two), _sum_row()]


def _encoding_row() -> dict[str, Any]:
    """What rank 0 does and what each other rank does with 32 sequences of the context that decode is measured at."""
    plan = step_plan(Work("decode", 32, 1))

    def there_and_back() -> None:
        step = decode(encode_step(plan))
        assert isinstance(step, Step)
        step.plan()

    return _row("plan of 32 sequences to msgpack and back", _median_s(there_and_back, REPEATS) * 1e6, "us")


def _round_trip_row(two: LoadedModel) -> dict[str, Any]:
    """A step with nothing in it: wakes the other rank up, which answers."""
    seconds = _median_s(lambda: two.runner.run(StepPlan(0, ())), REPEATS)
    return _row("empty step on 2 ranks, one waking the other", seconds * 1e6, "us")


def _sum_row() -> dict[str, Any]:
    """Two threads that hold each other up: two processes, which share no lock, are no slower."""
    times: list[float] = []

    def work(own: Any) -> None:
        x = torch.ones(1, 576)
        seconds = _median_s(lambda: own.all_reduce(x.fill_(1.0)), REPEATS)
        times.append(seconds)

    on_ranks(new_collectives(2), work)
    return _row("all-reduce of a row of 576, 2 ranks", max(times) * 1e6, "us")


def _load(path: Path) -> LoadedModel:
    model, sizes = ModelConfig(path=str(path)), {"num_blocks": 16, "num_threads": 2, "tensor_parallel_size": 2}
    return load_model(WorkerConfig(role="decode", worker_id="bench", model=model, attention="cpu", **sizes))


def _median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _row(metric: str, ours: float, unit: str) -> dict[str, Any]:
    return {"metric": metric, "ours": ours, "unit": unit, "better": "lower", "peers": {}, "floor": None}
