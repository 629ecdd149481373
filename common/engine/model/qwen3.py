"""Qwen3: the Llama layer with an RMSNorm over each q and k head before RoPE."""

from dataclasses import replace

from common.engine.model import llama
from common.engine.model.layers import DecoderLayer, LayerInputs, RmsNorm


def build_layer(inputs: LayerInputs, prefix: str) -> DecoderLayer:
    """One layer from the weights under `prefix`."""
    layer = llama.build_layer(inputs, prefix)
    return replace(
        layer,
        q_norm=_head_norm(inputs, f"{prefix}.self_attn.q_norm"),
        k_norm=_head_norm(inputs, f"{prefix}.self_attn.k_norm"),
    )


def _head_norm(inputs: LayerInputs, name: str) -> RmsNorm:
    return RmsNorm(inputs.weights.take(f"{name}.weight", (inputs.spec.head_dim,)), inputs.spec.rms_norm_eps, inputs.ops)
