"""The model families, one entry each: names in config.json and GGUF, layers as values, names of weights. Pure.

A new family is a new entry. What its layers need and `LayerSpec` lacks is a new field there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from common.checkpoint.layers import POST_NORMS, PRE_NORMS, Activation, AttentionOptions, LayerSpec
from common.checkpoint.rope import Rope
from common.checkpoint.spec import CheckpointError, ModelSpec

# Part of a layer -> its weight's name under `model.layers.N`, without ".weight".
LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
)
# Some weights of one tensor follow one another in it, see FUSED_PARTS.
PHI3_NAMES: Mapping[str, str] = MappingProxyType(
    {**LLAMA_NAMES, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
)
FUSED_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")})
# "{}" stands for the number of an expert.
MIXTRAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "router": "block_sparse_moe.gate",
        "expert_gate": "block_sparse_moe.experts.{}.w1",
        "expert_up": "block_sparse_moe.experts.{}.w3",
        "expert_down": "block_sparse_moe.experts.{}.w2",
    }
)
QWEN_MOE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "router": "mlp.gate",
        "expert_gate": "mlp.experts.{}.gate_proj",
        "expert_up": "mlp.experts.{}.up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
        "shared_gate": "mlp.shared_expert.gate_proj",
        "shared_up": "mlp.shared_expert.up_proj",
        "shared_down": "mlp.shared_expert.down_proj",
        "shared_weight": "mlp.shared_expert_gate",
    }
)
GLM4_MOE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **QWEN_MOE_NAMES,
        "choice_bias": "mlp.gate.e_score_correction_bias",
        **{f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    }
)
DEEPSEEK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "q_down": "self_attn.q_a_proj",
        "q_down_norm": "self_attn.q_a_layernorm",
        "q_up": "self_attn.q_b_proj",
        "latent": "self_attn.kv_a_proj_with_mqa",
        "latent_norm": "self_attn.kv_a_layernorm",
        "latent_up": "self_attn.kv_b_proj",
    }
)
GPT_OSS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "sinks": "self_attn.sinks",
        "router": "mlp.router",
        "expert_gate_up": "mlp.experts.{}.gate_up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
    }
)
GEMMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """`change` makes the family's layer of a plain one: pre-norms, grouped-query attention, no bias."""

    hf_classes: tuple[str, ...]  # `architectures` of config.json
    change: Callable[[LayerSpec], LayerSpec] = lambda layer: layer
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    has_permuted_gguf: bool = False  # GGUF stores rows of q and k permuted for interleaved RoPE
    hf_norm_offset: float = 0.0  # norms of Hugging Face files multiply by this plus the weight; in GGUF it is added
    activation: Activation = "silu"


def _with_qkv_bias(layer: LayerSpec) -> LayerSpec:
    return replace(layer, qkv_bias=True)


def _without_output_bias(layer: LayerSpec) -> LayerSpec:
    return replace(layer, output_bias=False)


def _with_sinks(layer: LayerSpec) -> LayerSpec:
    return replace(layer, has_sinks=True)


def _with_head_norms(layer: LayerSpec) -> LayerSpec:
    return replace(layer, qk_norm="head")


def _olmo2(layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms=POST_NORMS, qk_norm="full")


def _gemma2(layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms=(*PRE_NORMS, *POST_NORMS))


def _gemma3(layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms=(*PRE_NORMS, *POST_NORMS), qk_norm="head")


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(("LlamaForCausalLM", "MistralForCausalLM"), has_permuted_gguf=True),
        "qwen2": Family(("Qwen2ForCausalLM",), _with_qkv_bias),
        "qwen3": Family(("Qwen3ForCausalLM",), _with_head_norms),
        "gpt_oss": Family(("GptOssForCausalLM",), _with_sinks, GPT_OSS_NAMES, activation="clamped"),
        "glm4moe": Family(("Glm4MoeForCausalLM",), _without_output_bias, GLM4_MOE_NAMES),
        "deepseek_v2": Family(("DeepseekV2ForCausalLM",), names=DEEPSEEK_NAMES),
        "deepseek_v3": Family(("DeepseekV3ForCausalLM",), names=DEEPSEEK_NAMES),
        "granite": Family(("GraniteForCausalLM",), has_permuted_gguf=True),
        "phi3": Family(("Phi3ForCausalLM",), names=PHI3_NAMES),
        "mixtral": Family(("MixtralForCausalLM",), names=MIXTRAL_NAMES, has_permuted_gguf=True),
        "qwen2moe": Family(("Qwen2MoeForCausalLM",), _with_qkv_bias, QWEN_MOE_NAMES),
        "qwen3moe": Family(("Qwen3MoeForCausalLM",), _with_head_norms, QWEN_MOE_NAMES),
        "olmoe": Family(("OlmoeForCausalLM",), lambda layer: replace(layer, qk_norm="full"), QWEN_MOE_NAMES),
        "olmo2": Family(("Olmo2ForCausalLM",), _olmo2, GEMMA_NAMES),
        "gemma_2": Family(("Gemma2ForCausalLM",), _gemma2, GEMMA_NAMES, hf_norm_offset=1.0, activation="gelu_tanh"),
        "gemma3": Family(("Gemma3ForCausalLM",), _gemma3, GEMMA_NAMES, hf_norm_offset=1.0, activation="gelu_tanh"),
    }
)


def family_of(spec: ModelSpec) -> Family:
    """Raises CheckpointError when there is no such family."""
    if spec.architecture not in FAMILIES:
        raise CheckpointError(f"architecture {spec.architecture!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[spec.architecture]


def layers_of(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The model's layers, first to last."""
    family = family_of(spec)
    windows = spec.windows or (0,) * spec.num_layers
    plain = (_plain_layer(spec, idx, window, family.activation) for idx, window in enumerate(windows))
    return tuple(family.change(layer) for layer in plain)


def _plain_layer(spec: ModelSpec, idx: int, window: int, activation: Activation) -> LayerSpec:
    of_all = Rope(spec.rope_theta, spec.rope_scaling, spec.rotary_size, spec.has_interleaved_rope)
    rope = spec.window_rope if window and spec.window_rope is not None else of_all
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    return LayerSpec(
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        norm_eps=spec.rms_norm_eps,
        rope=rope,
        attention=AttentionOptions(scale, window, spec.attention_soft_cap, spec.latent.rank if spec.latent else 0),
        activation=activation,
        qk_norm="head" if spec.has_head_norms else "none",
        qkv_bias=spec.attention_bias,
        output_bias=spec.attention_bias,
        mlp_bias=spec.mlp_bias,
        residual_scale=spec.residual_scale,
        experts=None if idx in spec.dense_layers else spec.experts,
        latent=spec.latent,
    )
