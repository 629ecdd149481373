"""`Checkpoint`: a Hugging Face directory or a GGUF file as one value, whichever it was read from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from common.checkpoint.spec import ModelSpec

GenerationDefaults = Mapping[str, float | int]


@dataclass(frozen=True)
class Checkpoint:
    """What a model says about itself. Opening reads metadata only; the tokenizer is built when first asked for.

    `eos_token_ids` holds every id that ends an answer, the tokenizer's own `eos_token_id` first.
    `generation_defaults` may hold temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, as the
    model's authors advise.
    """

    path: Path
    format: Literal["huggingface", "gguf"]
    config: ModelSpec
    chat_template: str | None
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    digest: str
    tokenizer_digest: str
    served_name: str
    build_tokenizer: Callable[[], Tokenizer]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, one object for all callers: never set truncation or padding on it."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.build_tokenizer()
