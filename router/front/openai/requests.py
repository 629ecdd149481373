"""Bodies of the OpenAI API as typed structures. Pure data: `router.front.openai.specs` says what they ask for.

Types are strict: "5", 5.0 and true are no integers. Of a key given twice the last counts, as JSON parsers agree.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec

from router.front.openai.constraints import ResponseFormat, StructuredOutputs
from router.front.openai.fields import Ignored, NotOffered
from router.front.openai.tools import CallBody, ToolBody, ToolChoice
from router.request import limits
from router.request.spec import Stated, within

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ROLES = ("system", "developer", "user", "assistant", "tool")
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS = [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: NotOffered = None


class GenerationBody(Stated, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats share."""

    max_tokens: Annotated[int, within(1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None
    allowed_tools: NotOffered = None
    documents: NotOffered = None
    request_id: NotOffered = None
    return_tokens_as_token_ids: NotOffered = None
    service_tier: NotOffered = None
    session_id: NotOffered = None
    spaces_between_special_tokens: NotOffered = None
    store: NotOffered = None
    stream_interval: NotOffered = None
    truncate_prompt_tokens: NotOffered = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[Any], msgspec.Meta(extra_json_schema={"anyOf": _PROMPTS})]
    max_tokens: Annotated[int, within(0)] | None = None
    logprobs: Annotated[int, within(0, limits.MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: NotOffered = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    cache_control: Ignored = None
    file: NotOffered = None
    image_url: NotOffered = None
    input_audio: NotOffered = None
    annotations: NotOffered = None
    refusal: NotOffered = None
    video_url: NotOffered = None


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning` and `reasoning_content`, of earlier answers, are for the template; two names for one thing.

    `tool_calls` are an assistant's; a message of the role tool is the result of the one that `tool_call_id` names.
    """

    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ROLES})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None
    cache_control: Ignored = None
    id: Ignored = None
    annotations: NotOffered = None
    audio: NotOffered = None
    function_call: NotOffered = None
    refusal: NotOffered = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[MessageBody]
    max_completion_tokens: Annotated[int, within(1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, within(0, limits.MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    add_special_tokens: NotOffered = None
    audio: NotOffered = None
    chat_template: NotOffered = None
    continue_final_message: NotOffered = None
    echo: NotOffered = None
    function_call: NotOffered = None
    functions: NotOffered = None
    modalities: NotOffered = None
    verbosity: NotOffered = None
    web_search_options: NotOffered = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
