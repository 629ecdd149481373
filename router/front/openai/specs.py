"""What a body of the OpenAI API asks for, as a `RequestSpec`. Pure: no IO. Ranges are left to `validation`."""

from common.values.errors import InvalidRequest
from router.front.openai.constraints import constraint_of
from router.front.openai.fields import refuse_unsupported
from router.front.openai.prompts import chat_prompt, prompts_of
from router.front.openai.requests import ChatBody, CompletionBody, GenerationBody, StreamOptions
from router.front.openai.tools import tool_use
from router.request.spec import RequestSpec

_API_NAMES = {"deadline": "x-request-timeout-s"}


def completion_specs(body: CompletionBody, deadline_s: float | None) -> list[RequestSpec]:
    """One request per prompt."""
    refuse_unsupported(body)
    _check_stream_options(body)
    return [
        RequestSpec(
            prompt=prompt,
            stated=body,
            max_tokens=body.max_tokens,
            num_logprobs=body.logprobs,
            deadline_s=deadline_s,
            constraint=constraint_of(body),
            is_whole=not body.stream,
            echo=bool(body.echo),
            scores_echo=bool(body.echo) and body.logprobs is not None,
            api_names=_API_NAMES,
        )
        for prompt in prompts_of(body)
    ]


def chat_spec(body: ChatBody, deadline_s: float | None) -> RequestSpec:
    refuse_unsupported(body)
    _check_stream_options(body)
    max_tokens, max_tokens_name = _chat_max_tokens(body)
    use = tool_use(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    tools = () if use is None else use.shown_tools
    return RequestSpec(
        prompt=chat_prompt(
            body.messages, body.chat_template_kwargs, body.add_generation_prompt, tools, body.reasoning_effort
        ),
        stated=body,
        max_tokens=max_tokens,
        num_logprobs=_chat_logprobs(body),
        deadline_s=deadline_s,
        constraint=constraint_of(body),
        tools=use,
        is_whole=not body.stream,
        api_names={**_API_NAMES, "prompt": "messages", "max_tokens": max_tokens_name, "logprobs": "top_logprobs"},
    )


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream", param="prompt_logprobs")
    if body.stream_options is None or body.stream_options == StreamOptions():
        return
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
    refuse_unsupported(body.stream_options, "stream_options.")


def _chat_max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The value, and under which of its two names it was stated."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; state one", param="max_completion_tokens")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return 0 if body.top_logprobs is None else body.top_logprobs
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs is only allowed with logprobs", param="top_logprobs")
    return None
