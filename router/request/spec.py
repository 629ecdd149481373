"""A request as a client stated it, whichever API it came by. Pure: no IO, no checks: `validation` does them.

None always means "not stated": the model's advice applies, then the server's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from router.request import limits
from router.request.constraint import Constraint
from router.text.calls.tools import ToolUse
from router.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()  # as templates know them
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Range(NamedTuple):
    """Of a number. NaN is in none."""

    low: float
    high: float = float("inf")
    has_low: bool = True

    def holds(self, value: float) -> bool:
        return (self.low <= value if self.has_low else self.low < value) and value <= self.high

    def __str__(self) -> str:
        if not self.has_low:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"{self.low} or more" if self.high == float("inf") else f"between {self.low} and {self.high}"


def within(low: float, high: float = float("inf"), *, has_low: bool = True) -> msgspec.Meta:
    """Read by `validation`, for errors that name the API's field, and by the OpenAPI description."""
    schema = {"minimum" if has_low else "exclusiveMinimum": low}
    if high != float("inf"):
        schema["maximum"] = high
    return msgspec.Meta(extra_json_schema=schema, extra={"range": Range(low, high, has_low)})


class Stated(msgspec.Struct, kw_only=True):
    """What both APIs let a client state under the same names, which gRPC puts into groups."""

    model: str | None = None
    n: Annotated[int, within(1, limits.MAX_CHOICES)] | None = None
    best_of: Annotated[int, within(1, limits.MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, within(-10, 10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Annotated[float, within(0, 2)] | None = None
    top_p: Annotated[float, within(0, 1, has_low=False)] | None = None
    top_k: Annotated[int, within(-1)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    presence_penalty: Annotated[float, within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, within(-2, 2)] | None = None
    repetition_penalty: Annotated[float, within(0.01, 100)] | None = None
    seed: Annotated[int, within(-(2**63), 2**63 - 1)] | None = None
    logit_bias: dict[int, Annotated[float, within(-100, 100)]] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: Annotated[int, within(0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, within(0, limits.MAX_LOGPROBS)] | None = None
    priority: Annotated[int, within(-100, 100)] | None = None
    cache_salt: str | None = None


def _ranges() -> Mapping[str, Range]:
    hints = get_type_hints(Stated, include_extras=True)
    metas = {name: getattr(get_args(hint)[0], "__metadata__", ()) for name, hint in hints.items()}
    return {name: meta[0].extra["range"] for name, meta in metas.items() if meta}


RANGES = _ranges()


@dataclass(frozen=True, slots=True)
class Pins:
    """Workers that must do it, for debugging."""

    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    force_colocated: bool = False


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """`max_tokens` and `num_logprobs` stand apart: the APIs state them under several names.

    `scores_echo`: logprobs are wanted of the prompt, too, that `echo` repeats. `api_names` maps our name of a field to
    the API's, where they differ; errors use the API's.
    """

    prompt: Prompt
    stated: Stated = field(default_factory=Stated)
    max_tokens: int | None = None
    num_logprobs: int | None = None
    deadline_s: float | None = None
    pins: Pins = field(default_factory=Pins)
    constraint: Constraint | None = None
    tools: ToolUse | None = None
    is_whole: bool = False  # the answer is sent at once
    return_text: bool = True
    echo: bool = False
    scores_echo: bool = False
    api_names: Mapping[str, str] = field(default_factory=dict)
