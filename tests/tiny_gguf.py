"""Writes the tiny model of `tests.tiny_model` as a GGUF file, the way llama.cpp's converter would."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    **{"gemma3_text": "gemma3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"},
}
LAYER_NAMES |= {
    **{"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
# Part of an expert -> the stack of all of them.
STACKS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.\d+\.(\w+)\.weight")
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_tiny_gguf(
    source: Path,
    target: Path,
    quant: gguf.GGMLQuantizationType | None = None,
    *,
    tensors_per_part: int = 0,
    drop: tuple[str, ...] = (),
    replaced: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = MappingProxyType({}),
    **fields: Any,
) -> Path:
    """Convert a directory of `write_tiny_model`. `fields` are extra metadata, dots written as `__`.

    A tensor of `drop` is left out; one whose name holds a key of `replaced` has those bytes instead. With
    `tensors_per_part` the model is split, and the first part is returned.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=tensors_per_part)
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()))
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    for name, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add.get(type(value), writer.add_string)(name.replace("__", "."), value)
    if scaling := config.get("rope_scaling"):
        _add_rope(writer, config, scaling)
    tensors = _with_stacks(load_file(source / "model.safetensors"))
    for name, tensor in tensors.items():
        raw = next((value for part, value in replaced.items() if part in name), None)
        if raw is not None:
            writer.add_tensor(_gguf_name(name, LAYER_NAMES), raw[0], raw_dtype=raw[1])
        elif name not in drop:
            _add_tensor(writer, name, tensor, config, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))
    return parts[0] if tensors_per_part else target


def _with_stacks(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer as one tensor for each part, under the name that it has in GGUF."""
    stacks: dict[str, list[np.ndarray]] = {}
    plain = {}
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            stacks.setdefault(f"blk.{found[1]}.ffn_{STACKS[found[2]]}_exps.weight", []).append(tensor)
        else:
            plain[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    return plain | {name: np.stack(parts) for name, parts in stacks.items()}


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any], scaling: dict[str, Any]) -> None:
    """As llama.cpp's converter: Llama 3.1's divisors and LongRoPE's two sets are tensors, the rest is metadata."""
    kind = scaling["rope_type"]
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config["rope_theta"], config["head_dim"], scaling))
    elif kind == "longrope":
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors((1 + np.log(factor) / np.log(original)) ** 0.5)
        writer.add_rope_scaling_orig_ctx_len(original)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(scaling[f"{name}_factor"], dtype=np.float32))
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)


def rope_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """F32 [head_dim / 2], as `generate_extra_tensors` of Llama in llama.cpp's convert_hf_to_gguf.py."""
    low, high, old = (
        scaling[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for freq in 1.0 / (theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)):
        wavelength = 2 * np.pi / freq
        smooth = (old / wavelength - low) / (high - low)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(scaling["factor"])
        else:
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "partial_rotary_factor" in config:
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token_id in special else 1 for _, token_id in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: np.ndarray,
    config: dict[str, Any],
    quant: gguf.GGMLQuantizationType | None,
) -> None:
    stem = name.rpartition(".")[0]
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config["model_type"] in ("llama", "mixtral") and stem.split(".")[-1] in num_heads:
        tensor = _permute(tensor, num_heads[stem.split(".")[-1]])
    is_gemma = config["model_type"] == "gemma3_text"
    has_post_norms = is_gemma or config["model_type"] == "olmo2"
    gguf_name = _gguf_name(name, GEMMA_LAYER_NAMES if has_post_norms else LAYER_NAMES)
    if is_gemma and tensor.ndim == 1:
        tensor = tensor + 1
    if quant is None or tensor.ndim < 2:
        writer.add_tensor(gguf_name, tensor)
    else:
        writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, quant), raw_dtype=quant)


def _gguf_name(name: str, layer_names: Mapping[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("blk."):
        return name
    if not stem.startswith("model.layers."):
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{layer_names[part]}.{kind}"


def _permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
