"""What the body of `POST /v1/responses` asks for, as a `RequestSpec`. Pure: no IO. Ranges are left to `validation`."""

from collections.abc import Iterator, Sequence
from typing import Any

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import refuse_unsupported
from router.front.openai.items.messages import messages_of
from router.front.openai.items.requests import INCLUDABLE, LOGPROBS, ResponseBody, TextFormat, ToolChoiceItem
from router.front.openai.json_body import converted
from router.front.openai.prompts import check_template_kwargs
from router.front.openai.tools import (
    AllowedTools,
    FunctionName,
    FunctionTool,
    NamedTool,
    ToolChoice,
    ToolChoiceBody,
    check_tool_type,
    tool_use,
)
from router.request.constraint import Constraint
from router.request.spec import ChatPrompt, RequestSpec
from router.text.calls.tools import ToolUse

_API_NAMES = {
    **{"deadline": "x-request-timeout-s", "prompt": "input", "max_tokens": "max_output_tokens"},
    "logprobs": "top_logprobs",
}


def response_spec(body: ResponseBody, deadline_s: float | None) -> RequestSpec:
    """Raises InvalidRequest."""
    _refuse(body)
    use = tool_use(list(_tools(body.tools or ())), _choice(body.tool_choice), body.parallel_tool_calls)
    return RequestSpec(
        prompt=_prompt(body, use),
        stated=body,
        max_tokens=body.max_output_tokens,
        num_logprobs=_num_logprobs(body),
        deadline_s=deadline_s,
        constraint=_constraint(body),
        tools=use,
        is_whole=not body.stream,
        api_names=_API_NAMES,
    )


def has_logprobs(body: ResponseBody) -> bool:
    return LOGPROBS in (body.include or ())


def _refuse(body: ResponseBody) -> None:
    refuse_unsupported(body)
    for part, prefix in ((body.text, "text."), (body.reasoning, "reasoning.")):
        if part is not None:
            refuse_unsupported(part, prefix)
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            raise Unsupported(f"a response has one answer: {name} must be 1", param=name)
    if body.prompt_logprobs is not None:
        raise Unsupported("prompt_logprobs is not supported yet; use /v1/chat/completions", param="prompt_logprobs")
    for idx, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include[{idx}] must be one of {', '.join(INCLUDABLE)}", param=f"include[{idx}]")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")


def _prompt(body: ResponseBody, use: ToolUse | None) -> ChatPrompt:
    kwargs = body.chat_template_kwargs or {}
    check_template_kwargs(kwargs, "chat_template_kwargs")
    return ChatPrompt(
        messages=messages_of(body.input, body.instructions),
        template_kwargs=kwargs,
        tools=() if use is None else tuple(tool.for_template for tool in use.shown_tools),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _tools(stated: Sequence[Any]) -> Iterator[FunctionTool]:
    for idx, item in enumerate(stated):
        if isinstance(item, dict):
            check_tool_type(item.get("type"), f"tools[{idx}]")
        yield converted(item, FunctionTool, f"tools[{idx}]")


def _choice(stated: str | ToolChoiceItem | None) -> ToolChoice | None:
    """As chats state it."""
    match stated:
        case ToolChoiceItem(type="function", name=str(name)):
            return ToolChoiceBody("function", FunctionName(name))
        case ToolChoiceItem(type="allowed_tools", mode=mode, tools=tools) if tools:
            named = [NamedTool("function", FunctionName(tool.name)) for tool in tools]
            return ToolChoiceBody("allowed_tools", allowed_tools=AllowedTools(mode, named))
        case ToolChoiceItem():
            raise InvalidRequest(f"tool_choice of type {stated.type} names no function", param="tool_choice")
        case "none" | "auto" | "required" | None:
            return stated
    raise AssertionError(stated)  # the decoder lets no other through


def _num_logprobs(body: ResponseBody) -> int | None:
    if has_logprobs(body):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest(f"top_logprobs is only allowed with {LOGPROBS} in include", param="top_logprobs")
    return None


def _constraint(body: ResponseBody) -> Constraint | None:
    match body.text and body.text.format:
        case TextFormat(type="json_object"):
            return Constraint("json_object", None, "text.format")
        case TextFormat(type="json_schema", schema=schema):
            if schema is None:
                raise InvalidRequest("the type json_schema needs a schema", param="text.format.schema")
            return Constraint("json_schema", schema, "text.format.schema")
    return None
