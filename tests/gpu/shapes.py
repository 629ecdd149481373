"""A model of a common size with random weights: KV sized by the card, and where the time of a step goes."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.engine.loading import LoadedModel, load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.gpu.report import Measurement, Report
from tests.tiny_model import TinyModel, write_tiny_model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: decode steps of so many rows of so long sequences, prompts of so many tokens."""

    model: TinyModel
    rows: tuple[int, ...] = (1, 64, 256)
    lens: tuple[int, ...] = (1024, 8192)
    prompts: tuple[int, ...] = (512, 8192)
    num_repeats: int = 10


# Llama-3.2-1B's layers, with a small vocabulary.
ONE_BILLION = Sizes(
    TinyModel(
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        hidden_size=2048,
        intermediate_size=8192,
        max_position=16_384,
        dtype=torch.bfloat16,
    )
)
PARAMETERS = {
    "greedy": SamplingParams(seed=0, max_tokens=1, temperature=0.0),
    "temperature": SamplingParams(seed=0, max_tokens=1, temperature=0.8),
    "top_p": SamplingParams(seed=0, max_tokens=1, temperature=0.8, top_p=0.9),
}


def measure_shapes(report: Report, device: str = "cuda", sizes: Sizes = ONE_BILLION) -> None:
    """Step times by the wall, and of those the device's: the rest is the host's."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "shaped", sizes.model)
        start_s = time.perf_counter()
        loaded = load_model(config_of(path, device, sizes))
    report.measure(Measurement("load", "ms", 1e3 * (time.perf_counter() - start_s), {}, None, "lower"))
    report.check("KV is sized by the card", sizing_error(loaded))
    for name, plan in plans(sizes, loaded.cache.num_blocks[0]):
        wall_s, device_s = step_times(lambda plan=plan: loaded.runner.run(plan), device, sizes.num_repeats)  # type: ignore[misc]
        peers = {"device": 1e3 * device_s, "host share %": 100 * max(0.0, 1 - device_s / wall_s)}
        report.measure(Measurement(name, "ms", 1e3 * wall_s, peers, None, "lower"))


def config_of(path: Path, device: str, sizes: Sizes) -> WorkerConfig:
    settings: dict[str, object] = {"max_num_seqs": max(sizes.rows), "max_num_batched_tokens": max(sizes.prompts)}
    settings |= {"attention": "triton" if device == "cuda" else "cpu", "gpu_memory_utilization": 0.6}
    return WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), **settings)  # type: ignore[arg-type]


def sizing_error(loaded: LoadedModel) -> str | None:
    """Whether all that the worker has taken is near its share of the card, and not over it."""
    memory = loaded.device.memory
    if memory is None:
        return None
    share = memory.held() / memory.total()
    return None if 0.4 < share <= 0.6 else f"{share:.0%} of the card is taken, of 60 %"


def plans(sizes: Sizes, num_blocks: int) -> Iterator[tuple[str, StepPlan]]:
    """Sequences may share blocks: what is computed means nothing here."""
    for length in sizes.lens:
        table = tuple(idx % num_blocks for idx in range(-(-length // BLOCK_SIZE)))
        for rows in sizes.rows:
            kinds = PARAMETERS if rows == sizes.rows[len(sizes.rows) // 2] else {"greedy": PARAMETERS["greedy"]}
            for kind, params in kinds.items():
                sample = (SampleSpec(0, length, params),)
                batch = (ScheduledSequence(idx, (5,), length - 1, (table,), sample) for idx in range(rows))
                yield f"decode {rows} x {length}, {kind}", StepPlan(1, tuple(batch))
    for length in sizes.prompts:
        table = tuple(idx % num_blocks for idx in range(-(-length // BLOCK_SIZE)))
        sample = (SampleSpec(0, length, PARAMETERS["greedy"]),)
        yield f"prefill {length}", StepPlan(1, (ScheduledSequence(0, (5,) * length, 0, (table,), sample),))


def step_times(run: Callable[[], object], device: str, num_repeats: int) -> tuple[float, float]:
    """(seconds by the wall, seconds that the device computes) of one run, after one that is not counted."""
    run()
    start_s = time.perf_counter()
    for _ in range(num_repeats):
        run()
    wall_s = (time.perf_counter() - start_s) / num_repeats  # a step ends with its tokens on the host
    is_cuda = device == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    field = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    with profile(activities=[activity]) as profiler:
        run()
    return wall_s, sum(getattr(event, field) for event in profiler.key_averages()) / 1e6
