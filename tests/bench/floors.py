"""What the machine can do at most, measured in the same run: memory read rate and matrix rate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.checkpoint import ModelSpec

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Best of several tries: a floor must not be lowered by what else runs."""

    read_bytes_per_s: float
    flops_per_s: float


def measure_machine(dtype: torch.dtype, clock: Callable[[], float]) -> Machine:
    """For the current number of torch threads, by the clock that the engine is timed with."""
    big = torch.ones(64 << 20)  # 256 MB: no cache holds it
    left, right = torch.randn(512, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    read_s = _best_s(lambda: big.sum(), clock)
    product_s = _best_s(lambda: left @ right, clock)
    return Machine(big.nbytes / read_s, 2 * 512 * 2048 * 2048 / product_s)


def decode_floor(machine: Machine, spec: ModelSpec, dtype: torch.dtype, batch: int, context: int) -> float:
    """Tokens per second when weights are read once a step, KV once, and nothing else takes time."""
    weights = num_weights(spec)
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context * batch * dtype.itemsize
    compute_s = 2 * weights * batch / machine.flops_per_s
    weights_s = max(weights * dtype.itemsize / machine.read_bytes_per_s, compute_s)
    return batch / (weights_s + kv_bytes / machine.read_bytes_per_s)


def prefill_floor(machine: Machine, spec: ModelSpec, num_tokens: int) -> float:
    """Tokens per second of one prompt at the matrix rate; the head is computed for one token only."""
    linear = 2 * (num_weights(spec) - spec.vocab_size * spec.hidden_size) * num_tokens
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * num_tokens * num_tokens
    return num_tokens * machine.flops_per_s / (linear + attention)


def num_weights(spec: ModelSpec) -> int:
    """Those of the products: layers and head."""
    num_heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.hidden_size * (num_heads * spec.head_dim + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def _best_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        started_s = clock()
        call()
        times.append(clock() - started_s)
    return min(times)
