"""The answer of `POST /v1/responses` as typed structures. Pure data: `router.front.openai.items.render` fills them."""

from typing import Any, Literal

import msgspec

from router.front.openai.responses import PromptTokensDetails, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[TokenLogprob]
    annotations: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageOutput(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class CallOutput(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningOutput(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


OutputItem = MessageOutput | CallOutput | ReasoningOutput


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = 0  # that cost extra elsewhere; clients want the field


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """What was asked for, with the values that applied, and what came of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
