"""Attention on CPUs: compiled operators where they know a layer, else torch's over gathered slots.

In torch, decode rows of a batch are attended together; the query heads that share a KV head stand in the query axis,
so KV is never repeated. Prefill runs go one sequence at a time through `causal_attention`. The cache may be quantized.
"""

import torch
import torch.nn.functional as F

from common.checkpoint.layers import AttentionOptions
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.devices.cpu.gathers import DecodeGroup, Gathers
from common.engine.devices.cpu.native.ops import NativeOps
from common.engine.devices.cpu.torch_prefill import cap_scores, causal_attention, softmax
from common.engine.kv.attention_planes import read_rows, write_rows
from common.engine.kv.latent_planes import read_latents, write_latents
from common.engine.kv.quantized import is_quantized


class CpuAttention:
    """`AttentionBackend`. Keeps the gathers of the step being computed.

    The compiled operators take each layer that they know: no quantized cache, no latents, and in `attend` neither soft
    cap nor sinks.
    """

    def __init__(self, ops: NativeOps | None) -> None:
        """`ops` = None: torch's operators only."""
        self._ops = ops
        self._gathers: list[Gathers] = []  # of one step, each for a group of layers

    def rope_and_write(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        cos_sin: torch.Tensor,  # [max_position, head_dim] float32
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots; a token with slot -1 is not written. Returns rotated q."""
        if self._ops is not None and not is_quantized(kv[0].dtype):
            return self._ops.rope_write(q, k, v, cos_sin, kv, batch)
        gathers = self._gathers_of(batch, kv, q.dtype)
        cos, sin = gathers.angles(cos_sin)
        k = rotate(k.float() if is_quantized(kv[0].dtype) else k, cos, sin)  # rounded once, by the quantization
        if gathers.written_rows is not None:
            k, v = k[gathers.written_rows], v[gathers.written_rows]
        write_rows(kv, gathers.written_slots, k, v)
        return rotate(q, cos, sin)

    def rope_and_write_latent(
        self, q: torch.Tensor, latent: torch.Tensor, cos_sin: torch.Tensor, kv: LayerKV, batch: AttentionBatch
    ) -> torch.Tensor:
        """As `AttentionBackend.rope_and_write_latent`; a token with slot -1 is not written."""
        gathers = self._gathers_of(batch, kv, q.dtype)
        cos, sin = gathers.angles(cos_sin)
        head_dim = q.shape[2]
        turned = rotate(latent[:, None, -head_dim:], cos, sin)[:, 0]
        rows = torch.cat((latent[:, :-head_dim], turned), dim=1)
        write_latents(kv, gathers.written_slots, rows if gathers.written_rows is None else rows[gathers.written_rows])
        return rotate(q, cos, sin)

    def attend(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of every new token over its sequence. Returns [num_tokens, num_heads, head_dim]."""
        gathers = self._gathers_of(batch, kv, q.dtype)
        output = q.new_empty(*q.shape[:2], options.latent_rank or q.shape[2])
        runs = gathers.prefill_runs(options.window)
        is_plain = not options.soft_cap and not options.latent_rank
        is_known = is_plain and sinks is None and not is_quantized(kv[0].dtype)
        if self._ops is not None and is_known:
            if len(runs) < batch.seq_lens.shape[0]:
                self._ops.decode_attention(output, q, kv, batch, options)
        else:
            for group in gathers.decode_groups(options.window):
                output[group.rows] = _attend_group(q[group.rows], kv, group, options, sinks)
        for run in runs:
            rows = slice(run.first_row, run.last_row)
            k, v = _read(kv, run.slots, options, q.dtype)
            output[rows] = causal_attention(q[rows], k, v, options, sinks)
        return output

    def _gathers_of(self, batch: AttentionBatch, kv: LayerKV, dtype: torch.dtype) -> Gathers:
        for gathers in self._gathers:
            if gathers.batch is batch:
                return gathers
        if self._gathers and self._gathers[0].batch.positions is not batch.positions:
            self._gathers.clear()  # another step: the batches of one share their positions
        self._gathers.append(Gathers(batch, kv[0].shape[1], dtype))
        return self._gathers[-1]


def _read(
    kv: LayerKV, slots: torch.Tensor, options: AttentionOptions, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `slots`, [num_tokens, num_kv_heads, size] each."""
    return read_latents(kv, slots, options.latent_rank) if options.latent_rank else read_rows(kv, slots, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-rotation RoPE of [num_tokens, heads, head_dim], computed in float32."""
    low, high = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype)
    rotated_low, rotated_high = rotated.chunk(2, dim=-1)
    rotated_low.copy_((low * cos).sub_(high * sin))
    rotated_high.copy_((high * cos).add_(low * sin))
    return rotated


def _attend_group(
    q: torch.Tensor, kv: LayerKV, group: DecodeGroup, options: AttentionOptions, sinks: torch.Tensor | None
) -> torch.Tensor:
    num_seqs, max_len = group.slots.shape
    k, v = (
        rows.view(num_seqs, max_len, *rows.shape[1:]).transpose(1, 2)  # [num_seqs, num_kv_heads, max_len, head_dim]
        for rows in _read(kv, group.slots.view(-1), options, q.dtype)
    )
    grouped_q = q.view(num_seqs, k.shape[1], -1, q.shape[2])
    if not options.soft_cap and sinks is None:
        attended = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=group.mask, scale=options.scale)
        return attended.reshape(*q.shape[:2], -1)
    scores = grouped_q.float() @ k.float().transpose(2, 3) * options.scale
    if options.soft_cap:
        scores = cap_scores(scores, options.soft_cap)
    scores += group.mask
    of_heads = sinks.view(1, k.shape[1], -1, 1) if sinks is not None else None
    return (softmax(scores, of_heads).to(v.dtype) @ v).reshape(*q.shape[:2], -1)
