"""The prompts in bodies of the OpenAI API: strings, token ids, messages. Pure: no IO."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import refuse_unsupported
from router.front.openai.requests import ROLES, CompletionBody, ContentPart, MessageBody
from router.request import limits
from router.request.spec import ChatPrompt, Prompt, TextPrompt, TokenPrompt
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
    messages: Sequence[MessageBody], template_kwargs: Mapping[str, Any] | None, add_generation_prompt: bool | None
) -> ChatPrompt:
    """Raises InvalidRequest when the messages hold something other than text."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages holds more than {limits.MAX_MESSAGES} messages", param="messages")
    kwargs = template_kwargs or {}
    check_template_kwargs(kwargs, "chat_template_kwargs")
    return ChatPrompt(
        messages=tuple(_message(message, f"messages[{idx}]") for idx, message in enumerate(messages)),
        add_generation_prompt=add_generation_prompt is not False,
        template_kwargs=kwargs,
    )


def check_template_kwargs(kwargs: Mapping[str, Any], param: str) -> None:
    """Raise when they would replace what the template gets from us, nest too deeply, or are too many."""
    for name in kwargs:
        if name in _RESERVED_TEMPLATE_NAMES or not name.isidentifier():
            raise InvalidRequest(f"{param} cannot set {name[:64]!r}", param=param)
    level, num_values = _inside([kwargs]), 0
    for _ in range(limits.MAX_JSON_DEPTH):
        num_values += len(level)
        if num_values > limits.MAX_TEMPLATE_VALUES:
            raise InvalidRequest(f"{param} holds more than {limits.MAX_TEMPLATE_VALUES} values", param=param)
        level = _inside(level)
    if level:
        raise InvalidRequest(f"{param} is nested too deeply", param=param)


def _message(message: MessageBody, param: str) -> Message:
    check_role(message.role, f"{param}.role")
    refuse_unsupported(message, f"{param}.")
    if message.content is None:
        raise InvalidRequest(f"{param}.content is missing", param=f"{param}.content")
    content = message.content if isinstance(message.content, str) else _joined(message.content, f"{param}.content")
    return chat_message(message.role, content, message.name, message.reasoning_content or message.reasoning)


def check_role(role: str, param: str) -> None:
    if role in ("tool", "function"):
        raise Unsupported(f"{param}: {role!r} is not supported yet; this server offers no tools", param=param)
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


def _inside(values: Iterable[object]) -> list[object]:
    """What the containers among `values` hold."""
    inside: list[object] = []
    for value in values:
        if isinstance(value, Mapping):
            inside += value.values()
        elif isinstance(value, list):
            inside += value
    return inside
