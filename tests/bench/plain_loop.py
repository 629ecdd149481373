"""The peer that is always there: the model as one writes it in torch, F.linear and a static KV cache."""

import torch
import torch.nn.functional as F

from common.checkpoint import Checkpoint
from common.checkpoint.families import layers_of
from common.engine.model.rope import cos_sin_table
from common.engine.model.weights import load_tensors

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class PlainLoop:
    """`context` tokens of every sequence are cached; `decode` adds one, `prefill` starts from nothing."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._spec = checkpoint.config
        self._weights = dict(load_tensors(checkpoint, dtype))
        first = layers_of(self._spec)[0]
        self._cos_sin = cos_sin_table(first.rope, first.head_dim, self._spec.max_position).to(dtype)

    def compile(self) -> None:
        """The whole pass through `torch.compile`, at its first use and again for every new shape."""
        self._forward = torch.compile(self._forward, dynamic=False)  # type: ignore[method-assign]

    @torch.inference_mode()
    def prefill(self, batch: int, num_tokens: int) -> None:
        kv = self.new_cache(batch, num_tokens)
        self._forward(torch.full((batch, num_tokens), 17), kv, 0).argmax(-1)

    @torch.inference_mode()
    def decode(self, kv: Cache) -> None:
        """One greedy step; the last slot of the cache is the new token's."""
        batch, _, num_tokens, _ = kv[0][0].shape
        self._forward(torch.full((batch, 1), 17), kv, num_tokens - 1).argmax(-1)

    def new_cache(self, batch: int, num_tokens: int) -> Cache:
        """Keys and values of each layer: [batch, num_kv_heads, num_tokens, head_dim]"""
        shape = (batch, self._spec.num_kv_heads, num_tokens, self._spec.head_dim)
        dtype = self._cos_sin.dtype
        return [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(self._spec.num_layers)
        ]

    def _forward(self, token_ids: torch.Tensor, kv: Cache, start: int) -> torch.Tensor:
        embedding = self._weights["model.embed_tokens.weight"]
        hidden = F.embedding(token_ids, embedding)
        for layer in range(self._spec.num_layers):
            hidden = self._layer(hidden, f"model.layers.{layer}", kv[layer], start)
        return F.linear(self._norm(hidden[:, -1], "model.norm"), embedding).float()

    def _layer(
        self, hidden: torch.Tensor, prefix: str, kv: tuple[torch.Tensor, torch.Tensor], start: int
    ) -> torch.Tensor:
        keys, values = kv
        x, end = self._norm(hidden, f"{prefix}.input_layernorm"), start + hidden.shape[1]
        q, k, v = (self._heads(x, f"{prefix}.self_attn.{name}_proj") for name in "qkv")
        keys[:, :, start:end], values[:, :, start:end] = self._rotate(k, start), v
        is_causal = hidden.shape[1] > 1
        attended = F.scaled_dot_product_attention(
            self._rotate(q, start), keys[:, :, :end], values[:, :, :end], is_causal=is_causal, enable_gqa=True
        )
        hidden = hidden + self._linear(attended.transpose(1, 2).flatten(2), f"{prefix}.self_attn.o_proj")
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm")
        gate, up = (self._linear(x, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
        return hidden + self._linear(F.silu(gate) * up, f"{prefix}.mlp.down_proj")

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._linear(x, name).view(*x.shape[:2], -1, self._spec.head_dim).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = self._cos_sin[start : start + x.shape[2]].chunk(2, dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[f"{name}.weight"], self._spec.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])
