"""AttentionBackend for CPUs: torch operators over gathered slots.

Decode rows of a batch are attended together; the query heads that share a KV head stand in the query axis, so KV
is never repeated. Prefill runs go one sequence at a time through `causal_attention`.
"""

import torch
import torch.nn.functional as F

from common.model.backend import AttentionBatch
from common.model.cpu_plan import CpuPlan, DecodeGroup, PrefillRun, plan_batch
from common.model.cpu_prefill import causal_attention


class CpuBackend:
    """Keeps the plan of the step being computed: `rope_and_write` makes it, each `attend` of the step reads it."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._plan: CpuPlan | None = None

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
        if self._batch is not batch or self._plan is None:
            self._plan = plan_batch(batch, cos_sin, kv.shape[2], q.dtype)
            self._batch = batch
        plan = self._plan
        _write(k_slots(kv), rotate(k, plan.cos, plan.sin), plan)
        _write(v_slots(kv), v, plan)
        return rotate(q, plan.cos, plan.sin)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Causal attention of every new token over its sequence. Returns [num_tokens, num_heads, head_dim]."""
        plan = self._plan
        assert plan is not None, "attend before rope_and_write"
        assert self._batch is batch, "attend with another batch than rope_and_write"
        output = torch.empty_like(q)
        for group in plan.decode_groups:
            output[group.rows] = _attend_group(q[group.rows], kv, group, scale)
        for run in plan.prefill_runs:
            output[run.first_row : run.last_row] = attend_run(q[run.first_row : run.last_row], kv, run, scale)
        return output


def k_slots(kv: torch.Tensor) -> torch.Tensor:
    """[num_slots, num_kv_heads, head_dim] view of one layer's keys."""
    return kv[0].view(-1, *kv.shape[3:])


def v_slots(kv: torch.Tensor) -> torch.Tensor:
    """[num_slots, num_kv_heads, head_dim] view of one layer's values."""
    return kv[1].view(-1, *kv.shape[3:])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-rotation RoPE of [num_tokens, heads, head_dim], computed in float32."""
    low, high = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype)
    rotated_low, rotated_high = rotated.chunk(2, dim=-1)
    rotated_low.copy_((low * cos).sub_(high * sin))
    rotated_high.copy_((high * cos).add_(low * sin))
    return rotated


def _write(slots: torch.Tensor, values: torch.Tensor, plan: CpuPlan) -> None:
    values = values if plan.written_rows is None else values[plan.written_rows]
    slots.index_copy_(0, plan.written_slots, values)


def _attend_group(q: torch.Tensor, kv: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
    num_seqs, max_len = group.slots.shape
    num_kv_heads, head_dim = kv.shape[3:]
    index = group.slots.view(-1)
    k, v = (
        slots.index_select(0, index).view(num_seqs, max_len, num_kv_heads, head_dim).transpose(1, 2)
        for slots in (k_slots(kv), v_slots(kv))
    )
    grouped_q = q.view(num_seqs, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=group.mask, scale=scale).reshape(q.shape)


def attend_run(q: torch.Tensor, kv: torch.Tensor, run: PrefillRun, scale: float) -> torch.Tensor:
    """Causal attention of one run of tokens over its sequence. Returns the shape of q."""
    k, v = (slots.index_select(0, run.slots) for slots in (k_slots(kv), v_slots(kv)))
    return causal_attention(q, k, v, scale)
