"""`TritonBackend`: the attention of the model on a GPU, or under Triton's interpreter on the CPU.

Imports triton: import this module only where the triton path was chosen.
"""

import torch

from common.kernels.decode_attention import decode_attention
from common.kernels.launch import require_runnable
from common.kernels.prefill_attention import prefill_attention
from common.kernels.rope_write import rope_and_write
from common.model.backend import AttentionBatch, AttentionOptions


class TritonBackend:
    """`AttentionBackend` by Triton kernels. Stateless; everything runs on the current stream of q's device."""

    def __init__(self) -> None:
        """Raises RuntimeError where kernels cannot run."""
        require_runnable()

    def rope_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots (below 0: not written); returns the rotated q."""
        return rope_and_write(q, k, v, cos_sin, batch.positions, kv, batch.slot_mapping)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> torch.Tensor:
        """A step of single tokens splits the keys over programs; any other mix goes through the prefill kernel."""
        attention = decode_attention if batch.max_query_len <= 1 else prefill_attention
        return attention(q, kv, batch, options.scale, window=options.window, soft_cap=options.soft_cap)
