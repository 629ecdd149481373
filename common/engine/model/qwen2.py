"""Qwen2: the Llama layer with biases on q, k and v."""

from common.engine.model import llama
from common.engine.model.layers import DecoderLayer, LayerInputs


def build_layer(inputs: LayerInputs, prefix: str) -> DecoderLayer:
    """One layer from the weights under `prefix`."""
    return llama.build_layer(inputs, prefix, qkv_bias=True)
