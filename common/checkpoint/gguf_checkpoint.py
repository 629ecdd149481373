"""Reads what a GGUF model says about itself: shape, tensors, tokenizer, chat template."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint.checkpoint import Checkpoint
from common.checkpoint.digest import digest_files
from common.checkpoint.families import FAMILIES
from common.checkpoint.fused_tensors import split_fused, unstack_experts
from common.checkpoint.gemma3 import NUM_LAYERS_27B, gemma3_of_gguf
from common.checkpoint.gguf_experts import NORMALIZED as EXPERT_FAMILIES
from common.checkpoint.gguf_experts import family_of_gguf, read_gguf_experts
from common.checkpoint.gguf_files import GgufFiles, gguf_served_name, read_gguf_files
from common.checkpoint.gguf_rope import ROPE_TENSORS, read_gguf_rope
from common.checkpoint.gguf_tokenizer import TEMPLATE_NAMES, build_tokenizer, read_vocabulary, tokenizer_digest
from common.checkpoint.spec import CheckpointError, ModelSpec, within_layers
from common.checkpoint.tensors import StoredTensor, check_tensors

# Name in GGUF -> part of a layer, as `Family.names` has it.
LAYER_PARTS = {
    **{"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "output"},
    **{"attn_qkv": "qkv", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"},
    **{"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"},
    **{"attn_norm": "before_attention", "post_attention_norm": "after_attention"},
    **{"ffn_norm": "before_mlp", "post_ffw_norm": "after_mlp"},
    **{"ffn_gate_inp": "router", "ffn_gate_inp_shexp": "shared_weight"},
    **{"ffn_gate_shexp": "shared_gate", "ffn_up_shexp": "shared_up", "ffn_down_shexp": "shared_down"},
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
UNSUPPORTED = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def open_gguf(path: Path) -> Checkpoint:
    """Raises CheckpointError that names the file, and what is damaged or not offered."""
    files = read_gguf_files(path)
    try:
        return _open(path, files)
    except CheckpointError as error:
        text = str(error)
        raise error if text.startswith(str(path.parent)) else CheckpointError(f"{path}: {text}") from error


def huggingface_name(gguf_name: str, names: Mapping[str, str]) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. `names`: `Family.names`."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem.startswith("blk.") and stem.count(".") >= 2:
        _, layer, part = stem.split(".", 2)
        found = LAYER_PARTS.get(part, "")
        if found == "up" and "gate_up" in names:
            found = "gate_up"  # Phi-3's lies under the name of the second
        return f"model.layers.{layer}.{names.get(found, part)}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"


def _open(path: Path, files: GgufFiles) -> Checkpoint:
    metadata = files.metadata
    spec = _spec(files)
    names = FAMILIES[spec.architecture].names
    found = {name: tensor for name, tensor in files.tensors.items() if name not in ROPE_TENSORS}
    named = {huggingface_name(name, names): _as_matrix(tensor) for name, tensor in found.items()}
    tensors = split_fused(spec, unstack_experts(spec, named))
    check_tensors(path, spec, tensors)
    vocabulary = read_vocabulary(metadata)
    if len(vocabulary.tokens) > spec.vocab_size:
        raise CheckpointError(f"{len(vocabulary.tokens)} tokens do not fit embeddings for {spec.vocab_size}")
    special = {each: token for name, each in TEMPLATE_NAMES.items() if (token := vocabulary.token(name)) is not None}
    return Checkpoint(
        path=path,
        format="gguf",
        config=spec,
        tensors=tensors,
        chat_template=_chat_template(metadata),
        special_tokens=special,
        bos_token_id=vocabulary.special_ids.get("bos"),
        eos_token_ids=vocabulary.eos_token_ids(),
        generation_defaults={},
        digest=digest_files([_table(spec, files.tensors)], files.parts),
        tokenizer_digest=tokenizer_digest(metadata),
        served_name=gguf_served_name(path),
        build_tokenizer=partial(build_tokenizer, metadata),
    )


def _as_matrix(tensor: StoredTensor) -> StoredTensor:
    """The one row of a gate of a shared MLP is stored as a vector."""
    is_row = tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
    return replace(tensor, shape=(1, *tensor.shape)) if is_row else tensor


def _table(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> bytes:
    entries = sorted((name, each.shape, each.kind, each.offset) for name, each in tensors.items())
    return repr((spec, entries)).encode()


def _chat_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("tokenizer.chat_template should be text")
    return template


def _spec(files: GgufFiles) -> ModelSpec:
    family = family_of_gguf(files.metadata)
    if family not in FAMILIES:
        raise CheckpointError(f"architecture {family!r} is not one of {', '.join(FAMILIES)}")
    architecture = files.metadata["general.architecture"]
    if family not in EXPERT_FAMILIES and files.metadata.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{architecture}.expert_count is not supported for this architecture")
    for name in UNSUPPORTED:
        is_read = architecture == "gemma3" and name == "attention.sliding_window"
        if files.metadata.get(f"{architecture}.{name}") and not is_read:
            raise CheckpointError(f"{architecture}.{name} is not supported; use the Hugging Face directory")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in files.tensors:
            raise CheckpointError(f"weight {name} is missing")
    return _spec_of(family, architecture, files)


def _spec_of(family: str, architecture: str, files: GgufFiles) -> ModelSpec:
    def integer(name: str, absent: int | None = None) -> int:
        return _integer(files.metadata, f"{architecture}.{name}", absent)

    num_heads, hidden_size = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden_size // num_heads)
    if integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{architecture}.attention.value_length differs from key_length: not supported")
    rope = read_gguf_rope(files.metadata, architecture, head_dim, files.tensors)
    epsilon = files.metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float) or not 0 <= epsilon < math.inf:
        raise CheckpointError(f"{architecture}.attention.layer_norm_rms_epsilon should be a number, got {epsilon!r}")
    num_layers = within_layers(f"{architecture}.block_count", integer("block_count"))
    if family == "granite":
        raise CheckpointError("architecture 'granite' is not read from GGUF; use the Hugging Face directory")
    spec = ModelSpec(
        architecture=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=integer("feed_forward_length", 1 if family in EXPERT_FAMILIES else None),
        vocab_size=files.tensors["token_embd.weight"].shape[0],
        max_position=integer("context_length"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_size=rope.size,
        rms_norm_eps=epsilon,
        tie_embeddings="output.weight" not in files.tensors,
        experts=read_gguf_experts(files.metadata, family),
    )
    if architecture != "gemma3":
        return spec
    head_width = hidden_size // num_heads if num_layers == NUM_LAYERS_27B else head_dim
    return replace(spec, **gemma3_of_gguf(files.metadata, num_layers, hidden_size, head_width))


def _integer(metadata: Mapping[str, Any], key: str, absent: int | None) -> int:
    value = metadata.get(key, absent)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # the same for every layer
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"metadata field {key!r} should be a positive integer, got {value!r:.80}")
    return value
