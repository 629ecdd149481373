"""What the model needs from attention: `AttentionBackend`, implemented by the cpu and the triton path."""

from dataclasses import dataclass
from typing import Protocol

import torch

from common.checkpoint.layers import AttentionOptions

# One layer of the cache: a tensor [num_blocks, block_size, *row] for each plane of its group, in the group's order.
LayerKV = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, for the layers of one group. Sequences lie one after another in the flattened
    token axis. The batches of a step's groups share all tensors but `slot_mapping` and `block_tables`.

    Integer tensors are int32 on the model's device unless said otherwise.
    """

    positions: torch.Tensor  # [num_tokens] int64: position of each token in its sequence
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset of each token's KV
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1]: first token of each sequence in the flattened axis
    seq_lens: torch.Tensor  # [num_seqs]: tokens of each sequence after this step (cached + new)
    block_tables: torch.Tensor  # [num_seqs, max_blocks]: padded with 0, read only below seq_lens and within the window
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """RoPE + KV write, then attention over the paged cache.

    `kv` is one layer of it: keys and values with rows [num_kv_heads, head_dim]; if those are codes (int8 or
    float8_e4m3fn), then their scales, [num_kv_heads] float32 (`common.engine.kv.attention_planes`).
    """

    def rope_and_write(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        cos_sin: torch.Tensor,  # [max_position, head_dim] float32: cos in the first half, sin in the second
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k (half-rotation form), write k and v to their slots; returns the rotated q."""
        ...

    def rope_and_write_latent(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]: what turns of the queries
        latent: torch.Tensor,  # [num_tokens, rank + head_dim]
        cos_sin: torch.Tensor,  # as above
        kv: LayerKV,  # one plane, with rows [rank + head_dim]
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and the last `head_dim` of the latents, write those to their slots; returns the rotated q."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,  # [num_heads] float32: a score of each head that no token has
    ) -> torch.Tensor:
        """Causal attention of every new token over its sequence. Returns [num_tokens, num_heads, head_dim].

        Over latents (`AttentionOptions.latent_rank`) q has their size, and the result that of the rank.
        """
        ...
