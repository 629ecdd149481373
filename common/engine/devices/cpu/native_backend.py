"""AttentionBackend for CPUs with the compiled operators: single tokens are attended where their blocks lie.

Prefill runs are torch's business as in `cpu_backend`: there the products decide.
"""

import torch

from common.engine.contract.attention import AttentionBatch, AttentionOptions
from common.engine.devices.cpu.gather_plan import PrefillRun, prefill_runs
from common.engine.devices.cpu.native.ops import NativeOps
from common.engine.devices.cpu.torch_backend import attend_run


class NativeBackend:
    """Keeps the prefill runs of the step being computed; everything else is read from the batch itself."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._batch: AttentionBatch | None = None
        self._runs: list[PrefillRun] = []

    def rope_and_write(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        cos_sin: torch.Tensor,  # [max_position, head_dim] float32
        kv: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots; a token with slot -1 is not written. Returns rotated q."""
        if self._batch is not batch:
            self._runs = prefill_runs(batch, kv.shape[2])
            self._batch = batch
        return self._ops.rope_write(q, k, v, cos_sin, kv, batch)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of every new token over its sequence. Returns [num_tokens, num_heads, head_dim]."""
        assert options.is_plain, "the compiled operators know neither window nor soft cap"
        assert self._batch is batch, "attend with another batch than rope_and_write"
        output = torch.empty_like(q)
        if len(self._runs) < batch.seq_lens.shape[0]:
            self._ops.decode_attention(output, q, kv, batch, options.scale)
        for run in self._runs:
            output[run.first_row : run.last_row] = attend_run(q[run.first_row : run.last_row], kv, run, options)
        return output
