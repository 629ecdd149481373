"""Builds a tokenizer from GGUF metadata. Byte-level BPE only: the vocabulary kind that ggml calls "gpt2"."""

import hashlib
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from common.checkpoint.spec import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # ggml token types

# How text is cut before BPE, by `tokenizer.ggml.pre`; the expressions are those of the models' own tokenizer.json.
SPLIT_PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
DIGITS_APART = ("smollm",)  # every digit alone, then GPT-2's own expression


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Raises CheckpointError when the vocabulary is of a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"tokenizer model {kind!r} is not supported, only byte-level BPE ('gpt2')")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        _prepend_bos(tokenizer, tokens, metadata["tokenizer.ggml.bos_token_id"])
    return tokenizer


def tokenizer_digest(metadata: dict[str, Any]) -> str:
    """Hex sha256 over everything that decides how text becomes token ids."""
    fields = {name: value for name, value in metadata.items() if name.startswith("tokenizer.ggml.")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre not in SPLIT_PATTERNS:
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not one of {', '.join((*DIGITS_APART, *SPLIT_PATTERNS))}")
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERNS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    by_type = {CONTROL: tokenizer.add_special_tokens, USER_DEFINED: tokenizer.add_tokens}
    for token_type, add in by_type.items():
        found = [token for token, kind in zip(tokens, token_types, strict=True) if kind == token_type]
        add([AddedToken(token, special=token_type == CONTROL, normalized=False) for token in found])


def _prepend_bos(tokenizer: Tokenizer, tokens: list[str], bos_token_id: int) -> None:
    bos_token = tokens[bos_token_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A", special_tokens=[(bos_token, bos_token_id)]
    )
