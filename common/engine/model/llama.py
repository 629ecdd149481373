"""Llama family: grouped-query attention, RoPE, gated MLP, no biases."""

from common.engine.model.layers import (
    AttentionShape,
    DecoderLayer,
    GatedMlp,
    LayerInputs,
    RmsNorm,
    fused_linear,
    linear,
)
from common.engine.model.linear import Linear


def build_layer(inputs: LayerInputs, prefix: str, *, qkv_bias: bool = False) -> DecoderLayer:
    """One layer from the weights under `prefix`. Qwen2 differs in `qkv_bias` only."""
    spec, weights = inputs.spec, inputs.weights
    return DecoderLayer(
        shape=AttentionShape.of(spec),
        options=inputs.options,
        backend=inputs.backend,
        cos_sin=inputs.cos_sin,
        input_norm=_norm(inputs, f"{prefix}.input_layernorm"),
        qkv=_qkv(inputs, f"{prefix}.self_attn", bias=qkv_bias),
        output=linear(inputs, weights.take(f"{prefix}.self_attn.o_proj.weight", (spec.hidden_size, spec.q_size))),
        post_norm=_norm(inputs, f"{prefix}.post_attention_layernorm"),
        mlp=_mlp(inputs, f"{prefix}.mlp"),
    )


def _norm(inputs: LayerInputs, name: str) -> RmsNorm:
    return RmsNorm(
        inputs.weights.take(f"{name}.weight", (inputs.spec.hidden_size,)), inputs.spec.rms_norm_eps, inputs.ops
    )


def _qkv(inputs: LayerInputs, prefix: str, *, bias: bool) -> Linear:
    spec = inputs.spec
    sizes = {f"{prefix}.q_proj": spec.q_size, f"{prefix}.k_proj": spec.kv_size, f"{prefix}.v_proj": spec.kv_size}
    return fused_linear(inputs, sizes, spec.hidden_size, bias=bias)


def _mlp(inputs: LayerInputs, prefix: str) -> GatedMlp:
    spec = inputs.spec
    sizes = {f"{prefix}.gate_proj": spec.intermediate_size, f"{prefix}.up_proj": spec.intermediate_size}
    gate_up = fused_linear(inputs, sizes, spec.hidden_size, bias=False)
    down = inputs.weights.take(f"{prefix}.down_proj.weight", (spec.hidden_size, spec.intermediate_size))
    return GatedMlp(gate_up, linear(inputs, down), inputs.ops)
