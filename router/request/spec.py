"""A request as a client stated it, whichever API it came by. Pure: no IO, no checks: `validation` does them.

None always means "not stated": the model's advice applies, then the server's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopSpec:
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    force_colocated: bool = False


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """`api_names` maps our name of a field to the API's, where they differ; errors use the API's."""

    model: str
    prompt: Prompt
    num_choices: int = 1
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    skip_special_tokens: bool = True
    return_text: bool = True
    echo: bool = False
    api_names: Mapping[str, str] = field(default_factory=dict)
