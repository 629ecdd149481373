"""Bodies of the OpenAI API as typed structures. Pure data: `router.front.openai.specs` says what they ask for.

Types are strict: "5", 5.0 and true are no integers. Of a key given twice the last counts, as JSON parsers agree.
"""

from typing import Any, Literal

import msgspec

from router.request.spec import Stated


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: Any = None
    include_obfuscation: Any = None


class GenerationBody(Stated, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats share. `user` is accepted and has no effect, as at OpenAI."""

    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    # Known and not supported, see `router.front.openai.fields`.
    allowed_tools: Any = None
    best_of: Any = None
    documents: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    length_penalty: Any = None
    metadata: Any = None
    prompt_logprobs: Any = None
    request_id: Any = None
    response_format: Any = None
    return_tokens_as_token_ids: Any = None
    service_tier: Any = None
    session_id: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    stream_interval: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None
    video_url: Any = None


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    function_call: Any = None
    functions: Any = None
    include_reasoning: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
