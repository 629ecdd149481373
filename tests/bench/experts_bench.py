"""A mixture of experts, about 1B weights of which a token uses 0.12B: decode at batch 8, prefill of 512.

Weights are seeded and never written to a file. The floor of decode is the bytes of the experts that a step's tokens
choose; beside it torch's operators run the same model.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.checkpoint import ModelSpec
from common.checkpoint.layers import Experts, Routing
from common.checkpoint.tensors import expected_shapes
from common.engine.contract.kv_spec import KVGroup, KVSpec
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.engine.devices.cpu.device import CpuDevice, cpu_dtype
from common.engine.devices.cpu.native.ops import native_ops
from common.engine.executor.runner import ModelRunner
from common.engine.kv.attention_planes import attention_planes
from common.engine.kv.cache import KVCache
from common.engine.model.decoder import build_decoder
from common.engine.model.sharding import Cut
from common.engine.model.weights import Loader, Weights
from common.values.request import SamplingParams
from tests.bench.floors import Machine, measure_machine
from tests.caches import planes_of

SPEC = ModelSpec(
    architecture="qwen3moe",
    num_layers=12,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=384,
    vocab_size=32000,
    max_position=2048,
    rope_theta=1e6,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    experts=Experts(Routing(num_experts=64, num_active=4, is_normalized=True), 384),
)
BLOCK_SIZE, CONTEXT, BATCH, PROMPT = 16, 192, 8, 512
ROUNDS = 7
GREEDY = SamplingParams(seed=1, max_tokens=100, temperature=0.0)


def run() -> list[dict[str, Any]]:
    return measure(SPEC, (1, 2))


def measure(spec: ModelSpec, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    """Both kinds of work, in the type that `auto` takes here."""
    dtype, rows = cpu_dtype("auto"), []
    runners = {
        "ours": _runner(spec, CpuDevice(dtype, native_ops())),
        "torch operators": _runner(spec, CpuDevice(dtype, None)),
    }
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        machine = measure_machine(dtype, time.perf_counter)
        for name, num_tokens, plan, floor in (
            (f"decode {BATCH}", BATCH, _plan(BATCH, 1, CONTEXT), _decode_floor),
            (f"prefill {PROMPT}", PROMPT, _plan(1, PROMPT, 0), _prefill_floor),
        ):
            rates = {side: num_tokens / _median_s(partial(each.run, plan)) for side, each in runners.items()}
            label = (
                f"experts, {name}, {str(dtype).removeprefix('torch.')}, {num_threads} thread{'s' * (num_threads > 1)}"
            )
            peers = {side: rate for side, rate in rates.items() if side != "ours"}
            row = {"metric": label, "unit": "tok/s", "ours": rates["ours"], "peers": peers, "better": "higher"}
            rows.append(row | {"floor": floor(spec, machine, dtype)})
    return rows


def _runner(spec: ModelSpec, device: CpuDevice) -> ModelRunner:
    generator = torch.Generator().manual_seed(0)

    def loader(shape: tuple[int, ...]) -> Loader:
        def load(_: Cut | None) -> torch.Tensor:
            if len(shape) == 1:
                return torch.ones(shape)
            return torch.empty(shape, dtype=device.dtype).normal_(std=shape[-1] ** -0.5, generator=generator)

        return load

    weights = Weights({name: loader(shape) for name, shape in expected_shapes(spec).items()}, device.dtype)
    planes = attention_planes(spec.num_kv_heads, spec.head_dim, device.dtype)
    kv_spec = KVSpec(BLOCK_SIZE, (KVGroup(tuple(range(spec.num_layers)), planes),))
    cache = KVCache(kv_spec, (256,), device.place)
    for plane in planes_of(cache):
        plane.normal_(generator=generator)
    return ModelRunner(build_decoder(spec, weights, device), cache, device)


def _plan(batch: int, num_new: int, start: int) -> StepPlan:
    width = -(-(start + num_new) // BLOCK_SIZE)
    sequences = []
    for seq in range(batch):
        token_ids = tuple((7919 * (seq * num_new + idx)) % SPEC.vocab_size for idx in range(num_new))
        table = tuple(range(seq * width, (seq + 1) * width))
        sequences.append(ScheduledSequence(seq, token_ids, start, (table,), (SampleSpec(0, 3, GREEDY),)))
    return StepPlan(0, tuple(sequences))


def _median_s(call: Callable[[], object]) -> float:
    """Of all rounds but the first, which warms up."""
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def _decode_floor(spec: ModelSpec, machine: Machine, dtype: torch.dtype) -> float:
    """Tokens per second when attention, head, and each expert that a step is expected to choose are read once."""
    assert spec.experts is not None
    routing = spec.experts.routing
    chosen = routing.num_experts * (1 - (1 - routing.num_active / routing.num_experts) ** BATCH)
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * CONTEXT * BATCH * dtype.itemsize
    num_bytes = _weights(spec, chosen) * dtype.itemsize + kv_bytes
    return BATCH * machine.read_bytes_per_s / num_bytes


def _prefill_floor(spec: ModelSpec, machine: Machine, dtype: torch.dtype) -> float:
    """Tokens per second at the matrix rate; the head is computed for one token only."""
    assert spec.experts is not None
    flops = 2 * (_weights(spec, spec.experts.routing.num_active) - spec.vocab_size * spec.hidden_size)
    return machine.flops_per_s / (flops + 2 * spec.num_layers * spec.num_heads * spec.head_dim * PROMPT)


def _weights(spec: ModelSpec, num_experts: float) -> float:
    """Those of the products, with so many experts in each layer."""
    assert spec.experts is not None
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (attention + spec.experts.routing.num_experts)
    layer_experts = num_experts * 3 * spec.hidden_size * spec.experts.intermediate_size
    return spec.num_layers * (layer + layer_experts) + spec.vocab_size * spec.hidden_size
