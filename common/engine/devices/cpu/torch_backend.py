"""AttentionBackend for CPUs: torch operators over gathered slots.

Decode rows of a batch are attended together; the query heads that share a KV head stand in the query axis, so KV
is never repeated. Prefill runs go one sequence at a time through `causal_attention`. The cache may be quantized.
"""

import torch
import torch.nn.functional as F

from common.engine.contract.attention import AttentionBatch, AttentionOptions
from common.engine.devices.cpu.gather_plan import CpuPlan, DecodeGroup, PrefillRun, plan_batch
from common.engine.devices.cpu.torch_prefill import cap_scores, causal_attention
from common.engine.kv.quantized import is_quantized
from common.engine.kv.rows import read_rows, write_rows


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
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots; a token with slot -1 is not written. Returns rotated q."""
        if self._batch is not batch or self._plan is None:
            self._plan = plan_batch(batch, cos_sin, kv.shape[2], q.dtype)
            self._batch = batch
        plan = self._plan
        # rounded once, by the quantization
        k = rotate(k.float() if is_quantized(kv.dtype) else k, plan.cos, plan.sin)
        if plan.written_rows is not None:
            k, v = k[plan.written_rows], v[plan.written_rows]
        write_rows(kv, plan.written_slots, k, v)
        return rotate(q, plan.cos, plan.sin)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of every new token over its sequence. Returns [num_tokens, num_heads, head_dim]."""
        plan = self._plan
        assert plan is not None, "attend before rope_and_write"
        assert self._batch is batch, "attend with another batch than rope_and_write"
        output = torch.empty_like(q)
        for group in plan.decode_groups:
            output[group.rows] = _attend_group(q[group.rows], kv, group, options)
        for run in plan.prefill_runs:
            output[run.first_row : run.last_row] = attend_run(q[run.first_row : run.last_row], kv, run, options)
        return output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-rotation RoPE of [num_tokens, heads, head_dim], computed in float32."""
    low, high = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype)
    rotated_low, rotated_high = rotated.chunk(2, dim=-1)
    rotated_low.copy_((low * cos).sub_(high * sin))
    rotated_high.copy_((high * cos).add_(low * sin))
    return rotated


def _attend_group(q: torch.Tensor, kv: torch.Tensor, group: DecodeGroup, options: AttentionOptions) -> torch.Tensor:
    num_seqs, max_len = group.slots.shape
    k, v = (
        rows.view(num_seqs, max_len, *rows.shape[1:]).transpose(1, 2)  # [num_seqs, num_kv_heads, max_len, head_dim]
        for rows in read_rows(kv, group.slots.view(-1), q.shape[2], q.dtype)
    )
    grouped_q = q.view(num_seqs, k.shape[1], -1, q.shape[2])
    if options.is_plain:
        attended = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=group.mask, scale=options.scale)
        return attended.reshape(q.shape)
    scores = grouped_q.float() @ k.float().transpose(2, 3) * options.scale
    if options.soft_cap:
        scores = cap_scores(scores, options.soft_cap)
    scores += group.mask
    if options.window:
        hidden = torch.arange(max_len) < (group.lens - options.window).unsqueeze(1)
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).reshape(q.shape)


def attend_run(q: torch.Tensor, kv: torch.Tensor, run: PrefillRun, options: AttentionOptions) -> torch.Tensor:
    """Causal attention of one run of tokens over its sequence. Returns the shape of q."""
    k, v = read_rows(kv, run.slots, q.shape[2], q.dtype)
    return causal_attention(q, k, v, options)
