"""The prompts in bodies of the OpenAI API: strings, token ids, messages. Pure: no IO."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import refuse_unsupported
from router.front.openai.nesting import check_nesting
from router.front.openai.requests import ROLES, CompletionBody, ContentPart, MessageBody
from router.front.openai.tools import calls_of
from router.request import limits
from router.request.spec import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.text.calls.tools import Tool
from router.text.chat_template import Message, chat_message

_RESERVED_TEMPLATE_NAMES = ("messages", "add_generation_prompt", "tools", "documents")


def prompts_of(body: CompletionBody) -> list[Prompt]:
    """A string, its token ids, or a list of either."""
    special = body.add_special_tokens is not False
    if isinstance(body.prompt, str):
        return [TextPrompt(body.prompt, special)]
    if not body.prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    if isinstance(body.prompt[0], int | float):
        return [TokenPrompt(_ids(body.prompt, "prompt"))]
    if len(body.prompt) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds more than {limits.MAX_PROMPTS} prompts", param="prompt")
    return [_list_item(item, f"prompt[{idx}]", special) for idx, item in enumerate(body.prompt)]


def _list_item(item: object, param: str, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens)
    if isinstance(item, list):
        return TokenPrompt(_ids(item, param))
    raise InvalidRequest(f"{param} must be a string or a list of token ids", param=param)


def _ids(items: list[Any], param: str) -> tuple[int, ...]:
    if not all(type(item) is int for item in items):  # true and 1.5 are no ids
        raise InvalidRequest(f"{param} must hold integers only", param=param)
    return tuple(items)


def chat_prompt(
    messages: Sequence[MessageBody],
    template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    tools: Sequence[Tool] = (),
    reasoning_effort: str | None = None,
) -> ChatPrompt:
    """Raises InvalidRequest when the messages hold something other than text and calls."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages holds more than {limits.MAX_MESSAGES} messages", param="messages")
    kwargs = template_kwargs or {}
    check_template_kwargs(kwargs, "chat_template_kwargs")
    return ChatPrompt(
        messages=named_results([message_of(message, f"messages[{idx}]") for idx, message in enumerate(messages)]),
        add_generation_prompt=add_generation_prompt is not False,
        template_kwargs=kwargs,
        tools=tuple(tool.for_template for tool in tools),
        reasoning_effort=reasoning_effort,
    )


def check_template_kwargs(kwargs: Mapping[str, Any], param: str) -> None:
    """Raise when they would replace what the template gets from us, nest too deeply, or are too many."""
    for name in kwargs:
        if name in _RESERVED_TEMPLATE_NAMES or not name.isidentifier():
            raise InvalidRequest(f"{param} cannot set {name[:64]!r}", param=param)
    check_nesting([kwargs], param, limits.MAX_TEMPLATE_VALUES)


def message_of(message: MessageBody, param: str) -> Message:
    """As templates know it. Raises InvalidRequest."""
    _check_role(message.role, f"{param}.role")
    refuse_unsupported(message, f"{param}.")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise InvalidRequest(f"{param}.{name} belongs to the role {role}", param=f"{param}.{name}")
    calls = calls_of(message.tool_calls or (), f"{param}.tool_calls")
    reasoning = message.reasoning_content or message.reasoning
    stated = "" if message.content is None and reasoning and not calls else message.content  # our own cut answers
    content = _content(stated, f"{param}.content", is_optional=bool(calls))
    return chat_message(message.role, content, message.name, reasoning, calls, message.tool_call_id)


def named_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """With the function's name in each result that has none: some templates want it, and clients give only the id."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        named.append(message if name is None else {"name": name, **message})
    return tuple(named)


def _content(content: str | Sequence[ContentPart] | None, param: str, *, is_optional: bool) -> str | None:
    if content is None and not is_optional:
        raise InvalidRequest(f"{param} is missing", param=param)
    return content if content is None or isinstance(content, str) else _joined(content, param)


def _check_role(role: str, param: str) -> None:
    if role == "function":
        raise Unsupported(f"{param}: 'function' is not supported; use 'tool'", param=param)
    if role not in ROLES:
        raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}", param=param)


def _joined(parts: Sequence[ContentPart], param: str) -> str:
    for idx, part in enumerate(parts):
        if part.type != "text":
            where = f"{param}[{idx}].type"
            raise Unsupported(f"{where}: only content of type 'text' is supported yet", param=where)
        refuse_unsupported(part, f"{param}[{idx}].")
        if part.text is None:
            raise InvalidRequest(f"{param}[{idx}].text is missing", param=f"{param}[{idx}].text")
    return "".join(part.text or "" for part in parts)
