"""Writes a tiny seeded model as a Hugging Face directory: real files, real tokenizer, ready in well under a second.

The weights are random but lively: the next token depends on the whole prompt and margins are wide enough that
greedy output does not hang on rounding. Every architecture that `common.engine.model` knows can be written.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 1
PAD_TOKEN_ID = 2
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
MERGES = (
    *(("t", "h"), ("h", "e"), ("th", "e"), ("i", "n"), ("a", "n"), ("o", "n"), ("e", "r"), ("r", "e")),
    *(("Ġ", "the"), ("Ġ", "a"), ("in", "g"), ("an", "d"), ("Ġ", "and"), ("l", "l"), ("e", "n"), ("o", "r")),
    *(("Ġ", "w"), ("o", "u"), ("Ġ", "s"), ("e", "d"), ("i", "s"), ("a", "t"), ("e", "s"), ("Ġ", "in")),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CLASSES = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2"},
    **{
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "phi3": "Phi3",
        "granite": "Granite",
        "gpt_oss": "GptOss",
        "glm4_moe": "Glm4Moe",
    },
    **{"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"},
    **{"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"},
}
# Where the experts lie, the router and the names of an expert's gate, up and down.
_QWEN_PARTS = ("mlp", "gate", "gate_proj", "up_proj", "down_proj")
EXPERT_PARTS = {
    "mixtral": ("block_sparse_moe", "gate", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"), _QWEN_PARTS),
}
NUM_EXPERTS, NUM_ACTIVE, EXPERT_SIZE, SHARED_SIZE = 8, 3, 32, 96
EXPERT_FIELDS = {
    **{"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE},
    **{"moe_intermediate_size": EXPERT_SIZE, "shared_expert_intermediate_size": SHARED_SIZE},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None},
}


# The latents of DeepSeek: what queries and keys come from, and of each head what turns, what does not, and the value.
QUERY_RANK, KV_RANK, TURNING, KEY_SIZE, VALUE_SIZE = 24, 32, 8, 16, 24
LATENT_FIELDS: dict[str, Any] = {
    **{"kv_lora_rank": KV_RANK, "qk_rope_head_dim": TURNING, "qk_nope_head_dim": KEY_SIZE, "v_head_dim": VALUE_SIZE},
    **{"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE, "moe_intermediate_size": EXPERT_SIZE},
    **{"n_shared_experts": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    "rope_scaling": {
        **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 0.707, "mscale_all_dim": 1.0},
    },
}
WINDOW = 5
# What only some have in config.json.
FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    # every third layer sees all tokens
    "gemma3": {
        **{"sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12},
        **{"rope_local_base_freq": 100.0, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma2": {
        **{"sliding_window": WINDOW, "query_pre_attn_scalar": 12, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gpt_oss": {
        **{"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE, "sliding_window": WINDOW},
        **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
            "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe": {
        **EXPERT_FIELDS,
        **{"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 3, "n_group": 4, "topk_group": 2, "use_qk_norm": True},
        **{"routed_scaling_factor": 1.5, "norm_topk_prob": True, "attention_bias": True, "first_k_dense_replace": 0},
    },
    "deepseek_v2": LATENT_FIELDS | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT_FIELDS | {"q_lora_rank": QUERY_RANK, "norm_topk_prob": True},
    "granite": {
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.4},
        **{"residual_multiplier": 0.6, "logits_scaling": 1.5},
    },
    **{name: EXPERT_FIELDS | {"norm_topk_prob": False} for name in ("mixtral", "qwen2_moe", "olmoe")},
    "qwen3_moe": EXPERT_FIELDS | {"norm_topk_prob": True},
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What to write. `head_dim` is 16 and GQA has two query heads per KV head."""

    architecture: str = "llama"  # a key of CLASSES
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    max_position: int = 2048
    tie_embeddings: bool = False
    has_biases: bool = False  # of attention, and of the MLP where the family can have them
    num_dense_layers: int = 0  # the first ones, of DeepSeek, have no experts
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL_TOKENS) + 256 + len(MERGES)


# One of each family.
FAMILIES = {name: TinyModel(architecture=name) for name in CLASSES} | {
    "gemma2": TinyModel(architecture="gemma2", tie_embeddings=True),
    "gemma3": TinyModel(architecture="gemma3", num_layers=4, tie_embeddings=True),
    "deepseek_v2": TinyModel(architecture="deepseek_v2", num_kv_heads=4, head_dim=TURNING),
    "deepseek_v3": TinyModel(architecture="deepseek_v3", num_kv_heads=4, head_dim=TURNING, num_dense_layers=1),
}


def write_tiny_model(path: Path, model: TinyModel | None = None) -> Path:
    """Write the directory (made if missing) and return it. The same `model` always writes the same bytes."""
    model = model or TinyModel()
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _config(model))
    _write_json(path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    _write_json(path / "generation_config.json", {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID})
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    save_file(_tensors(model), path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text round-trips; encoding with special tokens prepends BOS."""
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: idx for idx, piece in enumerate(pieces)}, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_TOKEN_ID)])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def _config(model: TinyModel) -> dict[str, Any]:
    biases = {"attention_bias": True, "mlp_bias": model.architecture == "llama"} if model.has_biases else {}
    fields: dict[str, Any] = FIELDS.get(model.architecture, {}) | biases
    if "kv_lora_rank" in fields:
        fields |= {"first_k_dense_replace": model.num_dense_layers}
    return fields | {
        "architectures": [f"{CLASSES[model.architecture]}ForCausalLM"],
        "model_type": "gemma3_text" if model.architecture == "gemma3" else model.architecture,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }


def _tensors(model: TinyModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(model.seed)

    def randn(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(model.dtype)

    def linear(num_out: int, num_in: int, gain: float = 1.0) -> torch.Tensor:
        return randn(num_out, num_in, std=gain * num_in**-0.5)

    hidden, q_size, kv_size = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    fields = FIELDS.get(model.architecture, {})
    tensors = {"model.embed_tokens.weight": randn(model.vocab_size, hidden, std=1.0)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": 1 + randn(hidden, std=0.1),
            f"{prefix}.self_attn.q_proj.weight": linear(q_size, hidden, gain=1.5),
            f"{prefix}.self_attn.k_proj.weight": linear(kv_size, hidden, gain=1.5),
            f"{prefix}.self_attn.v_proj.weight": linear(kv_size, hidden, gain=1.5),
            f"{prefix}.self_attn.o_proj.weight": linear(hidden, q_size, gain=1.5),
            f"{prefix}.post_attention_layernorm.weight": 1 + randn(hidden, std=0.1),
            f"{prefix}.mlp.gate_proj.weight": linear(model.intermediate_size, hidden, gain=1.5),
            f"{prefix}.mlp.up_proj.weight": linear(model.intermediate_size, hidden, gain=1.5),
            f"{prefix}.mlp.down_proj.weight": linear(hidden, model.intermediate_size, gain=1.5),
        }
        if model.architecture in EXPERT_PARTS and layer >= model.num_dense_layers:
            for part in ("gate", "up", "down"):
                del tensors[f"{prefix}.mlp.{part}_proj.weight"]
            tensors |= _experts(model, prefix, linear)
        if "kv_lora_rank" in fields:
            _make_latent(model, prefix, fields["q_lora_rank"], randn, tensors)
        if model.architecture == "gpt_oss":
            _make_gpt_oss(model, prefix, randn, tensors)
        _change(model, prefix, randn, tensors)
    # the weights of Gemma's norms stand for what is added to one
    tensors["model.norm.weight"] = randn(hidden, std=0.1) + (0 if model.architecture in ("gemma2", "gemma3") else 1)
    if not model.tie_embeddings:
        tensors["lm_head.weight"] = linear(model.vocab_size, hidden, gain=3.0)
    return tensors


def _change(
    model: TinyModel, prefix: str, randn: Callable[..., torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    """What the architecture has besides, or elsewhere, than a plain layer."""
    hidden, q_size, kv_size = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if model.architecture in ("qwen2", "qwen2_moe", "glm4_moe"):
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        tensors |= {f"{prefix}.self_attn.{n}_proj.bias": randn(size, std=0.5) for n, size in sizes.items()}
    if model.architecture in ("gemma2", "gemma3"):
        places = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        tensors |= {f"{prefix}.{place}_layernorm.weight": randn(hidden, std=0.1) for place in places}
    if model.has_biases:
        sizes = {"self_attn.q": q_size, "self_attn.k": kv_size, "self_attn.v": kv_size, "self_attn.o": hidden}
        if model.architecture == "llama":
            sizes |= {"mlp.gate": model.intermediate_size, "mlp.up": model.intermediate_size, "mlp.down": hidden}
        tensors |= {f"{prefix}.{n}_proj.bias": randn(size, std=0.5) for n, size in sizes.items()}
    if model.architecture == "phi3":
        for fused, (where, parts) in {"qkv": ("self_attn", "qkv"), "gate_up": ("mlp", ("gate", "up"))}.items():
            rows = [tensors.pop(f"{prefix}.{where}.{part}_proj.weight") for part in parts]
            tensors[f"{prefix}.{where}.{fused}_proj.weight"] = torch.cat(rows)
    if model.architecture == "olmoe":
        sizes = {"q": q_size, "k": kv_size}
        tensors |= {f"{prefix}.self_attn.{n}_norm.weight": 1 + randn(size, std=0.1) for n, size in sizes.items()}
    if model.architecture == "olmo2":
        tensors[f"{prefix}.post_feedforward_layernorm.weight"] = tensors.pop(f"{prefix}.input_layernorm.weight")
        sizes = {"q": q_size, "k": kv_size}
        tensors |= {f"{prefix}.self_attn.{n}_norm.weight": 1 + randn(size, std=0.1) for n, size in sizes.items()}
    if model.architecture in ("qwen3", "qwen3_moe", "glm4_moe", "gemma3"):
        one = 0 if model.architecture == "gemma3" else 1
        tensors |= {f"{prefix}.self_attn.{n}_norm.weight": one + randn(model.head_dim, std=0.1) for n in "qk"}


def _experts(model: TinyModel, prefix: str, linear: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for each expert and part, as the models were published."""
    where, router, gate, up, down = EXPERT_PARTS[model.architecture]
    is_wide = model.architecture in ("mixtral", "olmoe")  # their experts have the size that others' one MLP has
    hidden, inner = model.hidden_size, model.intermediate_size if is_wide else EXPERT_SIZE
    tensors = {f"{prefix}.{where}.{router}.weight": linear(NUM_EXPERTS, hidden, gain=2.0)}
    for expert in range(NUM_EXPERTS):
        of_expert = f"{prefix}.{where}.experts.{expert}"
        tensors |= {f"{of_expert}.{part}.weight": linear(inner, hidden, gain=1.5) for part in (gate, up)}
        tensors[f"{of_expert}.{down}.weight"] = linear(hidden, inner, gain=1.5)
    if model.architecture in ("qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        shared = f"{prefix}.mlp.shared_expert{'' if model.architecture == 'qwen2_moe' else 's'}"
        tensors |= {f"{shared}.{part}_proj.weight": linear(SHARED_SIZE, hidden, gain=1.5) for part in ("gate", "up")}
        tensors[f"{shared}.down_proj.weight"] = linear(hidden, SHARED_SIZE, gain=1.5)
    if model.architecture == "qwen2_moe":
        tensors[f"{shared}_gate.weight"] = linear(1, hidden)
    if model.architecture in ("glm4_moe", "deepseek_v3"):
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = linear(NUM_EXPERTS, 1, gain=0.2)[:, 0].contiguous()
    return tensors


def _make_latent(
    model: TinyModel,
    prefix: str,
    query_rank: int | None,
    randn: Callable[..., torch.Tensor],
    tensors: dict[str, torch.Tensor],
) -> None:
    """In place of q, k and v: latents, and queries straight or through a rank of their own."""
    attention, hidden, heads = f"{prefix}.self_attn", model.hidden_size, model.num_heads
    for part in "qkv":
        del tensors[f"{attention}.{part}_proj.weight"]
    queries = heads * (KEY_SIZE + TURNING)
    shapes = {"q_proj": (queries, hidden)}
    if query_rank is not None:
        shapes = {"q_a_proj": (query_rank, hidden), "q_b_proj": (queries, query_rank)}
        tensors[f"{attention}.q_a_layernorm.weight"] = 1 + randn(query_rank, std=0.1)
    shapes["kv_a_proj_with_mqa"] = (KV_RANK + TURNING, hidden)
    shapes["kv_b_proj"] = (heads * (KEY_SIZE + VALUE_SIZE), KV_RANK)
    shapes["o_proj"] = (hidden, heads * VALUE_SIZE)
    tensors |= {
        f"{attention}.{name}.weight": randn(*shape, std=1.5 * shape[1] ** -0.5) for name, shape in shapes.items()
    }
    tensors[f"{attention}.kv_a_layernorm.weight"] = 1 + randn(KV_RANK, std=0.1)


def _make_gpt_oss(
    model: TinyModel, prefix: str, randn: Callable[..., torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    """Biases everywhere, sinks, and the experts of a layer in two tensors, inputs before outputs."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for part in ("gate", "up", "down"):
        del tensors[f"{prefix}.mlp.{part}_proj.weight"]
    sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
    tensors |= {f"{prefix}.self_attn.{n}_proj.bias": randn(size, std=0.5) for n, size in sizes.items()}
    tensors |= {
        f"{prefix}.self_attn.sinks": randn(model.num_heads, std=1.0),
        f"{prefix}.mlp.router.weight": randn(NUM_EXPERTS, hidden, std=2 * hidden**-0.5),
        f"{prefix}.mlp.router.bias": randn(NUM_EXPERTS, std=0.5),
        f"{prefix}.mlp.experts.gate_up_proj": randn(NUM_EXPERTS, hidden, 2 * inner, std=4 * hidden**-0.5),
        f"{prefix}.mlp.experts.gate_up_proj_bias": randn(NUM_EXPERTS, 2 * inner, std=0.5),
        f"{prefix}.mlp.experts.down_proj": randn(NUM_EXPERTS, inner, hidden, std=inner**-0.5),
        f"{prefix}.mlp.experts.down_proj_bias": randn(NUM_EXPERTS, hidden, std=0.5),
    }
