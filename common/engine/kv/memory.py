"""How much of a device's own memory is left for the KV cache, and whether the weights fit at all.

Weights are loaded first; then the largest step is run once, and the cache takes what neither needs at its peak.
"""

from math import ceil, prod

import torch

from common.checkpoint import Checkpoint, CheckpointError
from common.engine.contract.device import Memory
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.values.request import SamplingParams

# The driver's context, compiled kernels, recorded steps and links: memory that torch does not count.
OVERHEAD_BYTES = 1 << 30
_BITS = (8, 4)


def room_for_weights(memory: Memory, share: float) -> int:
    """What a worker may take in all, less what it takes beside tensors."""
    return int(share * memory.total()) - OVERHEAD_BYTES


def room_for_cache(memory: Memory, share: float, peak_bytes: int) -> int:
    """What is left beside `peak_bytes` of tensors, of this worker's share and of what others have left.

    Raises CheckpointError when nothing is.
    """
    left = min(room_for_weights(memory, share), memory.free() + memory.held() - OVERHEAD_BYTES) - peak_bytes
    if left <= 0:
        raise CheckpointError(
            f"no memory is left for a KV cache: weights and the largest step take {_gb(peak_bytes)}, and a worker may "
            f"take {_gb(room_for_weights(memory, share))} of the {_gb(memory.total())} (gpu_memory_utilization "
            f"{share:g}), of which {_gb(memory.free())} are free: lower max_num_batched_tokens, or see what else runs"
        )
    return left


def check_weights_fit(checkpoint: Checkpoint, dtype: torch.dtype, memory: Memory, share: float) -> None:
    """Raises CheckpointError that says over how many devices, or in how many bits, they would fit."""
    needed = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()) * dtype.itemsize
    room = room_for_weights(memory, share)
    if needed <= room:
        return
    name = str(dtype).removeprefix("torch.")
    fitting = [bits for bits in _BITS if needed * bits <= room * 8 * dtype.itemsize]
    in_bits = f", or {fitting[0]} bits a weight (quantization)" if fitting else ""
    raise CheckpointError(
        f"the weights take {_gb(needed)} in {name}, and a worker may take {_gb(room)} of this GPU: it would take "
        f"{ceil(needed / max(1, room))} ranks (tensor_parallel_size){in_bits}, which this version has on CPUs only"
    )


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_len: int, block_size: int, num_groups: int
) -> StepPlan:
    """As many tokens as a step may have, of as many sequences, all drawn from. They share blocks, from 0 on."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    size = min(max_num_batched_tokens // num_seqs, max_len)
    table = tuple(range(ceil(size / block_size)))
    greedy = SampleSpec(choice_idx=0, position=0, params=SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    sequences = (ScheduledSequence(idx, (0,) * size, 0, (table,) * num_groups, (greedy,)) for idx in range(num_seqs))
    return StepPlan(0, tuple(sequences))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
