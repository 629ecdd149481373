"""`Checkpoint`: a Hugging Face directory or a GGUF file as one value, whichever it was read from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from common.checkpoint.spec import ModelSpec
from common.checkpoint.tensors import Tensor

GenerationDefaults = Mapping[str, float | int]


@dataclass(frozen=True)
class Checkpoint:
    """What a model says about itself. Opening reads metadata only; the tokenizer is built when first asked for.

    `tensors` are those to read, by Hugging Face name. `special_tokens` are by the name that a chat template uses.
    `eos_token_ids` holds every id that ends an answer, the tokenizer's own first.
    `generation_defaults` may hold temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, as the
    model's authors advise.
    """

    path: Path
    format: Literal["huggingface", "gguf"]
    config: ModelSpec
    tensors: Mapping[str, Tensor]
    chat_template: str | None
    special_tokens: Mapping[str, str | list[str]]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    digest: str
    tokenizer_digest: str
    served_name: str
    build_tokenizer: Callable[[], Tokenizer]
    stored_as: str | None = None  # how the weights' numbers are encoded, where they are dequantized at load

    @property
    def bos_token(self) -> str | None:
        token = self.special_tokens.get("bos_token")
        return token if isinstance(token, str) else None

    @property
    def eos_token(self) -> str | None:
        token = self.special_tokens.get("eos_token")
        return token if isinstance(token, str) else None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, one object for all callers: never set truncation or padding on it."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.build_tokenizer()
