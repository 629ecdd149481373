"""The body of `POST /v1/responses` as typed structures. Pure data: `router.front.openai.items.specs` says what it asks
for. Nothing of a response is kept here, so a conversation comes whole, as items, with each request.
"""

from typing import Annotated, Any, Literal

import msgspec

from router.front.openai.fields import Ignored, NotOffered
from router.front.openai.requests import Effort
from router.front.openai.tools import FunctionName
from router.request import limits
from router.request.spec import Stated, within

# What may be asked for besides; the others are of tools that run on the server, or of what is in the answer anyway.
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_INPUT = msgspec.Meta(extra_json_schema={"anyOf": [{"type": "string"}, _OBJECTS]})


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`name` and `schema` belong to the type json_schema. A schema is always enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptionsBody(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: NotOffered = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    generate_summary: NotOffered = None
    summary: NotOffered = None


class ChosenFunction(FunctionName, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]


class ToolChoiceItem(msgspec.Struct, forbid_unknown_fields=True):
    """One function, or some of them."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenFunction] | None = None


class ItemStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Ignored = None


class ResponseBody(Stated, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`. Clients of vLLM may state the sampling fields of chats besides OpenAI's."""

    input: Annotated[str | list[Any], _INPUT]
    instructions: str | None = None
    max_output_tokens: Annotated[int, within(1)] | None = None
    top_logprobs: Annotated[int, within(0, limits.MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: TextOptionsBody | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Any], msgspec.Meta(extra_json_schema=_OBJECTS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceItem | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: ItemStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_tool_calls: Ignored = None
    prompt_cache_retention: Ignored = None
    store: Ignored = None
    background: NotOffered = None
    context_management: NotOffered = None
    conversation: NotOffered = None
    previous_response_id: NotOffered = None
    prompt: NotOffered = None
    service_tier: NotOffered = None
    truncation: NotOffered = None


class ContentItem(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message. Of `output_text` the annotations and logprobs are an earlier answer's own."""

    type: str
    text: str | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    logprobs: Ignored = None
    detail: NotOffered = None
    file_data: NotOffered = None
    file_id: NotOffered = None
    file_url: NotOffered = None
    filename: NotOffered = None
    image_url: NotOffered = None
    input_audio: NotOffered = None
    refusal: NotOffered = None


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentItem]
    type: Literal["message"] = "message"
    id: Ignored = None
    phase: Ignored = None
    status: Ignored = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True):
    """An earlier call of a function. `arguments`: the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    namespace: NotOffered = None
    status: Ignored = None


class CallOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentItem]
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """What the model thought before its next item, for the template. `encrypted_content` cannot be ours."""

    type: Literal["reasoning"]
    content: list[ContentItem] | None = None
    encrypted_content: NotOffered = None
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
ITEMS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
