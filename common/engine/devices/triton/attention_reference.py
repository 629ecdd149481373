"""Attention over paged KV in plain torch and float64: what both attention kernels are held to."""

import torch

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.kv.attention_planes import read_rows
from common.engine.kv.quantized import is_quantized


def gather_reference(kv: LayerKV, block_table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, ...]:
    """K and V of the first `seq_len` tokens of a sequence, [seq_len, num_kv_heads, head_dim], also if quantized."""
    dtype, block_size = kv[0].dtype, kv[0].shape[1]
    positions = torch.arange(seq_len, device=kv[0].device)
    slots = block_table.long()[positions // block_size] * block_size + positions % block_size
    return read_rows(kv, slots, torch.float32 if is_quantized(dtype) else dtype)


def attend_reference(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]: the last query_len tokens of the sequence
    key: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    value: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_pos = torch.arange(key.shape[0], device=key.device)
    query_pos = key_pos[key.shape[0] - query.shape[0] :, None]
    hidden = key_pos > query_pos
    if window:
        hidden |= key_pos <= query_pos - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)


def paged_attention_reference(
    q: torch.Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float64 attention of every new token over its sequence; zero for the tokens of a sequence of length 0."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = batch.cu_seqlens_q.tolist()
    for idx, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(bounds[idx], bounds[idx + 1])
        if rows.start == rows.stop or seq_len == 0:
            continue
        key, value = gather_reference(kv, batch.block_tables[idx], seq_len)
        out[rows] = attend_reference(q[rows], key, value, scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return out
