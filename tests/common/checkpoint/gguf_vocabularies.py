"""The vocabularies that are compared with llama.cpp, by name, and the digests of its answers."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.tiny_vocabularies import byte_level_fields, sentencepiece_fields

IDS_FILE = Path(__file__).with_name("llama_cpp_ids.json")
DIGEST_LENGTH = 10
Fields = dict[str, Any]

VOCABULARIES: dict[str, Callable[[], Fields]] = {
    "sentencepiece": lambda: sentencepiece_fields(space_prefix=True),
    "sentencepiece without a space prefix": lambda: sentencepiece_fields(space_prefix=False),
    "sentencepiece, nothing said of spaces": lambda: sentencepiece_fields(add_space_prefix=None),
    "sentencepiece without BOS": lambda: sentencepiece_fields(add_bos_token=False),
    "sentencepiece with EOS": lambda: sentencepiece_fields(add_eos_token=True),
    "sentencepiece with another BOS": lambda: sentencepiece_fields(bos_token_id=3),
    "sentencepiece without types": lambda: sentencepiece_fields(token_type=None),
    "bytes with BOS": lambda: byte_level_fields("gpt-2", add_bos_token=True),
    "bytes with BOS and EOS": lambda: byte_level_fields("gpt-2", add_bos_token=True, add_eos_token=True),
    "bytes without BOS": lambda: byte_level_fields("llama-bpe", add_bos_token=False),
    "bytes, nothing said of the cut": lambda: byte_level_fields(None),
    **{f"pre:{name}": lambda name=name: byte_level_fields(name) for name in PRE_TOKENIZERS},  # type: ignore[misc]
}


def digest_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:DIGEST_LENGTH]
