"""Reads the metadata of a GGUF file: shape, tokenizer, chat template."""

from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint.checkpoint import Checkpoint
from common.checkpoint.digest import digest_files
from common.checkpoint.gguf_metadata import GgufHeader, read_gguf_header
from common.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_digest
from common.checkpoint.spec import CheckpointError, ModelSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Tokens that end an answer whatever eos_token_id says: the list is llama.cpp's (src/llama-vocab.cpp, special_eog_ids).
END_OF_GENERATION = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"}
)


def open_gguf(path: Path) -> Checkpoint:
    """Raises CheckpointError that names what is damaged or not offered."""
    header = read_gguf_header(path)
    metadata = header.metadata
    tokens = _tokens(path, metadata)
    bos_token_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_token_id = metadata.get("tokenizer.ggml.eos_token_id")
    spec = _spec(path, header)
    table = repr((spec, sorted(header.tensors.items()))).encode()
    return Checkpoint(
        path=path,
        format="gguf",
        config=spec,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=_token(path, tokens, bos_token_id),
        bos_token_id=bos_token_id,
        eos_token=_token(path, tokens, eos_token_id),
        eos_token_id=eos_token_id,
        eos_token_ids=_eos_token_ids(tokens, eos_token_id),
        generation_defaults={},
        digest=digest_files([table], [path]),
        tokenizer_digest=tokenizer_digest(metadata),
        served_name=path.stem,
        build_tokenizer=partial(build_tokenizer, metadata),
    )


def _tokens(path: Path, metadata: dict[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _token(path: Path, tokens: list[str], token_id: int | None) -> str | None:
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise CheckpointError(f"{path}: special token {token_id} is not in a vocabulary of {len(tokens)}")
    return tokens[token_id]


def _eos_token_ids(tokens: list[str], eos_token_id: int | None) -> tuple[int, ...]:
    named = [token_id for token_id, token in enumerate(tokens) if token in END_OF_GENERATION]
    return tuple(dict.fromkeys(token_id for token_id in (eos_token_id, *named) if token_id is not None))


def _spec(path: Path, header: GgufHeader) -> ModelSpec:
    metadata = header.metadata
    architecture = metadata.get("general.architecture", "none")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    if "rope_freqs.weight" in header.tensors or f"{architecture}.rope.scaling.type" in metadata:
        raise CheckpointError(f"{path}: RoPE scaling in GGUF is not supported; use the Hugging Face directory")
    for name in ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.get(f"{architecture}.{name}"):
            raise CheckpointError(f"{path}: {architecture}.{name} is not supported; use the Hugging Face directory")
    try:
        return _spec_of(architecture, header)
    except KeyError as error:
        raise CheckpointError(f"{path}: metadata field {error} is missing") from error


def _spec_of(architecture: str, header: GgufHeader) -> ModelSpec:
    def field(name: str) -> Any:  # int or float as the file says
        return header.metadata[f"{architecture}.{name}"]

    optional = header.metadata.get
    num_heads, hidden_size = field("attention.head_count"), field("embedding_length")
    return ModelSpec(
        architecture=architecture,
        num_layers=field("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=optional(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=optional(f"{architecture}.attention.key_length", hidden_size // num_heads),
        intermediate_size=field("feed_forward_length"),
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        max_position=field("context_length"),
        rope_theta=optional(f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=None,
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
