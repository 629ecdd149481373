"""Tools in bodies of the OpenAI API: functions, which of them may be called, calls in earlier messages. Pure: no IO."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import Ignored
from router.front.openai.nesting import check_nesting
from router.request import limits
from router.text.calls.tools import Mode, Tool, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`strict`: in a call that the model decides to make, arguments follow the schema; else they are JSON."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(FunctionBody, forbid_unknown_fields=True, kw_only=True):
    """In one piece, as responses have it."""

    type: Literal["function"]


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """In two pieces, as chats have it."""

    type: str
    function: FunctionBody | None = None
    cache_control: Ignored = None
    custom: Ignored = None


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """One function, or some of them."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceBody


class CallFunctionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`arguments`: the text of a JSON object, or the object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an earlier answer."""

    function: CallFunctionBody
    id: str | None = None
    type: Literal["function"] = "function"
    index: Ignored = None


def tool_use(
    stated: Sequence[ToolBody | FunctionTool],
    choice: ToolChoice | None,
    parallel: bool | None,
    params: tuple[str, str] = ("tools", "tool_choice"),
) -> ToolUse | None:
    """None: no tools are stated. `params`: the API's names of tools and choice, for errors. Raises InvalidRequest."""
    tools, where = checked_tools(stated, params[0]), params[1]
    mode, allowed = _choice_of(choice)
    if not tools:
        if mode == "required":
            raise InvalidRequest(f"{where} asks for a call, and there are no tools", param=where)
        return None
    known = {tool.name for tool in tools}
    if missing := sorted(allowed - known):
        raise InvalidRequest(f"{where} names {missing[0][:64]!r}, which is none of the tools", param=where)
    is_named = isinstance(choice, ToolChoiceBody) and choice.type == "function"
    return ToolUse(tools, mode, allowed, is_named or parallel is False)


def _choice_of(choice: ToolChoice | None) -> tuple[Mode, frozenset[str]]:
    match choice:
        case None:
            return "auto", frozenset()
        case "auto" | "none" | "required":
            return choice, frozenset()
        case ToolChoiceBody(type="function", function=FunctionName(name)):
            return "required", frozenset([name])
        case ToolChoiceBody(type="allowed_tools", allowed_tools=AllowedTools(mode, tools)) if tools:
            return mode, frozenset(tool.function.name for tool in tools)
    raise InvalidRequest(f"tool_choice of type {choice.type} names no function", param=f"tool_choice.{choice.type}")


def checked_tools(stated: Sequence[ToolBody | FunctionTool], param: str) -> tuple[Tool, ...]:
    if len(stated) > limits.MAX_TOOLS:
        raise InvalidRequest(f"{param} holds more than {limits.MAX_TOOLS} tools", param=param)
    tools = tuple(_tool(tool, f"{param}[{idx}]") for idx, tool in enumerate(stated))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{param} holds two functions of one name", param=param)
    check_nesting([tool.parameters for tool in tools], param, limits.MAX_TOOL_VALUES)
    return tools


def check_tool_type(stated: object, param: str) -> None:
    if stated != "function":
        raise Unsupported(f"{param}.type: only tools of type 'function' are supported", param=f"{param}.type")


def _tool(stated: ToolBody | FunctionTool, param: str) -> Tool:
    check_tool_type(stated.type, param)
    function, where = (stated, param) if isinstance(stated, FunctionTool) else (stated.function, f"{param}.function")
    if function is None:
        raise InvalidRequest(f"{where} is missing", param=where)
    if not _NAME.fullmatch(function.name):
        message = f"{where}.name must be 1 to 64 letters, digits, '_', '-' or '.'"
        raise InvalidRequest(message, param=f"{where}.name")
    parameters = f"{where}.parameters"
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{parameters} must be a schema of the type object", param=parameters)
    return Tool(function.name, function.description, function.parameters or None, bool(function.strict), parameters)


def calls_of(stated: Sequence[CallBody], param: str) -> list[dict[str, Any]]:
    """As templates know calls: their arguments are objects. Raises InvalidRequest."""
    return [call_of(call.function, call.id, f"{param}[{idx}].function.arguments") for idx, call in enumerate(stated)]


def call_of(function: CallFunctionBody, call_id: str | None, param: str) -> dict[str, Any]:
    """`param`: of the arguments. Raises InvalidRequest."""
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        arguments = _object(arguments, param)
    check_nesting([arguments], param, limits.MAX_TOOL_VALUES)
    identity = {"id": call_id} if call_id else {}
    return {**identity, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{param} is no JSON", param=param) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return value
