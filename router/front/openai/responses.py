"""Answers of the OpenAI API as typed structures. Pure data: `router.front.openai.render` fills them.

A field that is UNSET is left out; None is written as null. Extensions that clients of vLLM know: `stop_reason`,
`token_ids`, `prompt_token_ids`, `prompt_logprobs`, `metrics`.
"""

from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestMetrics(msgspec.Struct):
    """The waterfall in milliseconds: route + queue + prefill + kv_exposed + decode_queue + decode == wall."""

    time_to_first_token_ms: float
    wall_ms: float
    route_ms: float
    queue_time_ms: float
    prefill_ms: float
    kv_transfer_ms: float
    kv_exposed_ms: float
    kv_overlap_ratio: float
    decode_queue_ms: float
    decode_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    kv_bytes: int
    kv_chunks: int
    retries: int


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Of a prompt's first token there is nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """As vLLM names it. `rank` 1: no token was more likely."""

    logprob: float
    rank: int
    decoded_token: str


# Of each prompt token, by token id: its own and those of the most likely tokens; null for the first.
PromptTokens = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    """Whole or streamed: the same form."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class FunctionCall(msgspec.Struct):
    arguments: str
    name: str


class ToolCall(msgspec.Struct):
    """`arguments` are the text of a JSON object."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """`reasoning_content` and `reasoning` are one thing under the names of two times."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A call's id and name come first, then its arguments piece by piece."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", bound=CompletionChoice | ChatChoice | ChatChunkChoice)


class Answer(msgspec.Struct, Generic[ChoiceT]):
    """A whole answer or a chunk; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokens | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    system_fingerprint: None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    default_sampling: dict[str, float]
    tool_parser: str | None
    reasoning_parser: str | None
    object: str = "model"
    owned_by: str = "pdserve"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
