"""Small vocabularies out of `tests.texts`: always the same, with merges across every place where text is cut.

As `tokenizer.ggml.*` fields, as a `tokenizer.json`, and as a SentencePiece model.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

from tests.texts import CORPUS

BOS, EOS, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"
TOOL = "<tool>"
SPACE = "\u2581"
NUM_MERGES = 160
NORMAL, UNKNOWN_TYPE, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_merges() -> list[tuple[str, str]]:
    """Byte pair encoding of whole texts, uncut: what a pre-tokenizer must keep apart, these join."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [list(piece) for text in CORPUS for piece, _ in to_bytes.pre_tokenize_str(text)]
    return _merges_of(words)


def byte_level_tokens() -> list[str]:
    """Special tokens, one token a byte, then one a merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in byte_level_merges()]
    return list(dict.fromkeys([BOS, EOS, PAD, *alphabet, *merged, TOOL]))


def byte_level_fields(pre: str | None, **changes: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a byte-level vocabulary; a change to None leaves a field out."""
    tokens = byte_level_tokens()
    types = {BOS: CONTROL, EOS: CONTROL, PAD: CONTROL, TOOL: USER_DEFINED}
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [types.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(pair) for pair in byte_level_merges()],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return _named(fields | changes)


def sentencepiece_fields(*, space_prefix: bool = True, **changes: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a SentencePiece vocabulary, as llama.cpp's converter writes it."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [[SPACE if char == " " else char for char in text] for text in CORPUS]
    chars = sorted({char for word in words for char in word if char.isalpha() or char in (SPACE, "1", ".", ",")})
    pieces = ["".join(pair) for pair in _merges_of([[c for c in word if c in set(chars)] for word in words])]
    tokens = list(dict.fromkeys([UNKNOWN, BOS, EOS, PAD, *bytes_, TOOL, *pieces, *chars]))
    types = {UNKNOWN: UNKNOWN_TYPE, BOS: CONTROL, EOS: CONTROL, PAD: CONTROL, TOOL: USER_DEFINED}
    types |= dict.fromkeys(bytes_, BYTE)
    first_piece = tokens.index(TOOL) + 1
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0 if idx < first_piece else float(first_piece - idx) for idx in range(len(tokens))],
        "token_type": [types.get(token, NORMAL) for token in tokens],
        "add_space_prefix": space_prefix,
    }
    return _named(fields | changes)


def sentencepiece_model(fields: dict[str, Any]) -> bytes:
    """The same vocabulary as a tokenizer.model."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = pb.ModelProto()
    named = [fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    for token, score, kind in zip(*named, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = fields["tokenizer.ggml.add_space_prefix"]
    model.normalizer_spec.remove_extra_whitespaces = False
    return bytes(model.SerializeToString())


def write_vocabulary(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file that holds a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def _merges_of(words: Sequence[list[str]]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for _ in range(NUM_MERGES):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        pair = min(pairs, key=lambda each: (-pairs[each], each))
        merges.append(pair)
        words = [_joined(word, pair) for word in words]
    return merges


def _joined(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for piece in word:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
