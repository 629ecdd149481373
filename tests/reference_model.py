"""The model once more, as the papers write it: one sequence, dense KV, float32, nothing of `common.engine.model`.

The truth for forward passes and, through `tests.one_process`, for every disaggregated answer.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
# Those of `tests.tiny_model` that it computes.
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
# Where experts lie under a layer, and the names of an expert's gate, up and down.
EXPERT_NAMES = {"block_sparse_moe": ("w1", "w3", "w2"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class ReferenceModel:
    """Reads a Hugging Face config and tensors by name. `past` in `forward` holds (k, v) per layer and grows."""

    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        self.config = config
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]

    def new_past(self) -> list[Tensors]:
        return [{} for _ in range(self.config["num_hidden_layers"])]

    @torch.inference_mode()
    def forward(self, token_ids: list[int], past: list[Tensors]) -> torch.Tensor:
        """Logits of every given token, [num_tokens, vocab_size]."""
        start = past[0]["k"].shape[1] if past[0] else 0
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for layer_idx, layer_past in enumerate(past):
            prefix = f"model.layers.{layer_idx}"
            x = x + self._attention_branch(x, prefix, layer_past, start)
            x = x + self._mlp_branch(x, prefix)
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self._norm(x, "model.norm") @ self.tensors[f"{head}.weight"].T

    @property
    def _is_olmo2(self) -> bool:
        """Norms on what attention and MLP give, not on what they take (OLMo 2, 2024, section 2)."""
        return bool(self.config.get("model_type") == "olmo2")

    def _attention_branch(self, x: torch.Tensor, prefix: str, past: Tensors, start: int) -> torch.Tensor:
        if self._is_olmo2:
            return self._norm(self._attention(x, prefix, past, start), f"{prefix}.post_attention_layernorm")
        return self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix, past, start)

    def _mlp_branch(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if self._is_olmo2:
            return self._norm(self._mlp(x, prefix), f"{prefix}.post_feedforward_layernorm")
        return self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm"), prefix)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x * x).mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def _attention(self, x: torch.Tensor, prefix: str, past: Tensors, start: int) -> torch.Tensor:
        q, k, v = (self._project(x, f"{prefix}.self_attn.{n}_proj") for n in "qkv")
        is_full = self.config.get("model_type") in ("olmo2", "olmoe")
        if is_full:  # over all heads at once
            q, k = self._norm(q, f"{prefix}.self_attn.q_norm"), self._norm(k, f"{prefix}.self_attn.k_norm")
        # [heads, num_tokens, head_dim]
        q, k, v = (y.view(len(x), -1, self.head_dim).transpose(0, 1) for y in (q, k, v))
        if f"{prefix}.self_attn.q_norm.weight" in self.tensors and not is_full:
            q, k = self._norm(q, f"{prefix}.self_attn.q_norm"), self._norm(k, f"{prefix}.self_attn.k_norm")
        q, k = self._rope(q, start), self._rope(k, start)
        if past:
            k, v = torch.cat((past["k"], k), dim=1), torch.cat((past["v"], v), dim=1)
        past["k"], past["v"] = k, v
        group = self.num_heads // self.num_kv_heads
        window = self._window(int(prefix.rsplit(".", 1)[1]))
        outputs = [
            _attend(
                q[head], k[head // group], v[head // group], start, window, self.config.get("attn_logit_softcapping")
            )
            for head in range(self.num_heads)
        ]
        return self._project(torch.cat(outputs, dim=-1), f"{prefix}.self_attn.o_proj")

    def _window(self, layer_idx: int) -> int | None:
        kinds = self.config.get("layer_types")
        return self.config["sliding_window"] if kinds and kinds[layer_idx] == "sliding_attention" else None

    def _mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        for where, parts in EXPERT_NAMES.items():
            if f"{prefix}.{where}.gate.weight" in self.tensors:
                return self._experts(x, f"{prefix}.{where}", parts)
        return self._gated(x, *(f"{prefix}.mlp.{part}_proj" for part in ("gate", "up", "down")))

    def _gated(self, x: torch.Tensor, gate_name: str, up_name: str, down_name: str) -> torch.Tensor:
        gate = self._project(x, gate_name)
        return self._project(gate * gate.sigmoid() * self._project(x, up_name), down_name)

    def _experts(self, x: torch.Tensor, prefix: str, parts: tuple[str, ...]) -> torch.Tensor:
        """Row by row: the few experts with the greatest probabilities (Shazeer et al. 2017; Mixtral normalizes)."""
        probabilities = self._project(x, f"{prefix}.gate").softmax(-1)
        is_normalized = self.config.get("norm_topk_prob", False) or "w1" in parts
        out = torch.zeros_like(x)
        for row, of_row in enumerate(probabilities):
            chosen = of_row.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
            total = sum(of_row[expert] for expert in chosen) if is_normalized else 1.0
            for expert in chosen:
                names = (f"{prefix}.experts.{expert}.{part}" for part in parts)
                out[row] += of_row[expert] / total * self._gated(x[row : row + 1], *names)[0]
        if f"{prefix}.shared_expert_gate.weight" in self.tensors:
            shared = self._gated(x, *(f"{prefix}.shared_expert.{part}" for part in parts))
            out += self._project(x, f"{prefix}.shared_expert_gate").sigmoid() * shared
        return out

    def _rope(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Every pair (i, i + head_dim / 2) as a complex number, turned by position * frequency."""
        half = self.head_dim // 2
        turned = torch.polar(
            torch.ones(x.shape[1], half),
            torch.outer(torch.arange(start, start + x.shape[1]).float(), self._frequencies()),
        )
        pairs = torch.complex(x[..., :half], x[..., half:]) * turned
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    def _frequencies(self) -> torch.Tensor:
        theta = self.config["rope_theta"]
        plain = [theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.config.get("rope_scaling")
        return torch.tensor([_llama3_frequency(f, scaling) for f in plain] if scaling else plain)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    for row in range(len(q)):
        scores[row, start + row + 1 :] = -math.inf
        if window:
            scores[row, : max(0, start + row + 1 - window)] = -math.inf
    return scores.softmax(-1) @ v


def _llama3_frequency(frequency: float, scaling: dict[str, Any]) -> float:
    """As in Meta's llama-models: three cases by wavelength."""
    wavelength = 2 * math.pi / frequency
    original = scaling["original_max_position_embeddings"]
    low_factor, high_factor = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high_factor:
        return frequency
    if wavelength > original / low_factor:
        return float(frequency / scaling["factor"])
    smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
    return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)


def load_reference(path: Path) -> ReferenceModel:
    """A reference model from a Hugging Face directory with one weight file."""
    from safetensors.torch import load_file

    return ReferenceModel(json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"))
