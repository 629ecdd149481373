"""What a `GenerateRequest` asks for, as a `RequestSpec`. Pure: no IO. Ranges are left to `validation`."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from common.values.errors import InvalidRequest, Unsupported
from common.wire.pb import generation_pb2 as pb
from router.front.openai.fields import check_unused
from router.front.openai.prompts import check_template_kwargs, message_of, named_results
from router.front.openai.requests import EFFORTS, MessageBody
from router.front.openai.tools import CallBody, CallFunctionBody, ToolBody, ToolChoice, tool_use
from router.request import limits
from router.request.constraint import Constraint
from router.request.spec import ChatPrompt, Pins, Prompt, RequestSpec, Stated, TextPrompt, TokenPrompt
from router.text.calls.tools import ToolUse
from router.text.chat_template import Message as ChatMessage

_GROUPS: Mapping[str, Descriptor] = {
    "sampling": pb.SamplingParams.DESCRIPTOR,
    "stop": pb.StopConditions.DESCRIPTOR,
    "output": pb.OutputOptions.DESCRIPTOR,
    "routing": pb.RoutingHints.DESCRIPTOR,
}
# Ours are those of OpenAI's API; here fields stand in groups.
API_NAMES = {name: f"{group}.{name}" for group, message in _GROUPS.items() for name in message.fields_by_name}
_PROMPT_NAMES = {"prompt": "prompt", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_STATED = frozenset(Stated.__struct_fields__)
_CONSTRAINTS = frozenset({"json_schema", "regex", "grammar", "choice"})
_EARLY_STOPPING: Mapping[str, bool | str] = {"true": True, "false": False, "never": "never"}
_READ_APART = _CONSTRAINTS | {"max_tokens", "logprobs", "return_text", "echo", "return_timings"}
_template_kwargs = msgspec.json.Decoder(dict[str, Any])
_tools = msgspec.json.Decoder(list[ToolBody])
_choice: msgspec.json.Decoder[ToolChoice] = msgspec.json.Decoder(ToolChoice)
ValueT = TypeVar("ValueT")


def generate_spec(request: pb.GenerateRequest, deadline_s: float | None) -> RequestSpec:
    """Raises InvalidRequest."""
    check_unused("session_id", request.session_id or None)
    output, routing = request.output, request.routing
    kind = request.WhichOneof("input") or ""
    use = tool_use_in(request)
    return RequestSpec(
        prompt=prompt_of(request, use),
        stated=_stated(request),
        max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        deadline_s=deadline_s,
        pins=Pins(routing.prefill_worker_id, routing.decode_worker_id, routing.force_colocated),
        constraint=_constraint(request.sampling),
        tools=use,
        is_whole=not request.stream,
        return_text=output.return_text if output.HasField("return_text") else True,
        echo=output.echo,
        api_names={**API_NAMES, "prompt": _PROMPT_NAMES[kind]},
    )


def _constraint(sampling: pb.SamplingParams) -> Constraint | None:
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return None
    value = list(sampling.choice.values) if kind == "choice" else getattr(sampling, kind)
    return Constraint(kind, value, f"sampling.{kind}")


def prompt_of(request: pb.GenerateRequest | pb.TokenizeRequest, use: ToolUse | None) -> Prompt:
    """Of the input that is set. `use`: the request's own."""
    match request.WhichOneof("input"):
        case "prompt":
            return TextPrompt(request.prompt, _adds_special_tokens(request))
        case "token_ids":
            assert isinstance(request, pb.GenerateRequest)
            return TokenPrompt(tuple(request.token_ids.ids))
        case "chat":
            return _chat(request.chat, use)
        case _:
            raise InvalidRequest("no input is set", param="input")


def _adds_special_tokens(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    if isinstance(request, pb.TokenizeRequest) and request.HasField("add_special_tokens"):
        return request.add_special_tokens
    return True


def _chat(chat: pb.ChatInput, use: ToolUse | None) -> ChatPrompt:
    if chat.continue_final_message:
        raise Unsupported("chat.continue_final_message is not supported yet", param="chat.continue_final_message")
    if not 0 < len(chat.messages) <= limits.MAX_MESSAGES:
        raise InvalidRequest(f"chat.messages must hold 1 to {limits.MAX_MESSAGES} messages", param="chat.messages")
    messages = named_results([_message(message, f"chat.messages[{idx}]") for idx, message in enumerate(chat.messages)])
    tools = () if use is None else tuple(tool.for_template for tool in use.shown_tools)
    kwargs, effort = _kwargs(chat.chat_template_kwargs_json), chat.reasoning_effort or None
    if effort not in (None, *EFFORTS):
        message = f"chat.reasoning_effort must be one of {', '.join(EFFORTS)}"
        raise InvalidRequest(message, param="chat.reasoning_effort")
    return ChatPrompt(messages, chat.add_generation_prompt, kwargs, tools, effort)


def tool_use_in(request: pb.GenerateRequest | pb.TokenizeRequest) -> ToolUse | None:
    """Of a chat that states tools. Raises InvalidRequest."""
    chat = request.chat  # empty where another input is set
    params = ("chat.tools_json", "chat.tool_choice")
    tools = _parsed(chat.tools_json, _tools, params[0]) if chat.tools_json else []
    choice: ToolChoice | None = None
    if chat.tool_choice:
        text = chat.tool_choice if chat.tool_choice.startswith("{") else json.dumps(chat.tool_choice)
        stated: ToolChoice = _parsed(text, _choice, params[1])
        choice = stated
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    return tool_use(tools, choice, parallel, params)


def _message(message: pb.ChatMessage, param: str) -> ChatMessage:
    calls = [CallBody(CallFunctionBody(call.name, call.arguments), call.id or None) for call in message.tool_calls]
    body = MessageBody(
        role=message.role,
        content=None if calls and not message.content else message.content,
        name=message.name or None,
        reasoning=message.reasoning or None,
        tool_call_id=message.tool_call_id or None,
        tool_calls=calls or None,
    )
    return message_of(body, param)


def _parsed(text: str, decoder: msgspec.json.Decoder[ValueT], param: str) -> ValueT:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{param}: {str(error)[:200]}", param=param) from error


def _kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    param = "chat.chat_template_kwargs_json"
    kwargs = _parsed(text, _template_kwargs, param)
    check_template_kwargs(kwargs, param)
    return kwargs


def _stated(request: pb.GenerateRequest) -> Stated:
    """What is set of the fields that have the same names in both APIs; what nothing reads is refused."""
    values: dict[str, Any] = {"model": request.model, "priority": request.priority, "cache_salt": request.cache_salt}
    for group in (request.sampling, request.stop, request.output):
        for field, value in group.ListFields():
            if field.name in _STATED:
                values[field.name] = _plain(field, value)
            elif field.name not in _READ_APART:
                check_unused(field.name, value, API_NAMES[field.name].removesuffix(field.name))
    return Stated(**values)


def _plain(field: FieldDescriptor, value: Any) -> Any:
    """A map is counted before it is read: 1 MiB holds 100,000 entries, and the event loop waits meanwhile."""
    if field.message_type is not None:
        if len(value) > limits.MAX_LOGIT_BIAS:
            param = API_NAMES[field.name]
            message = f"{param} holds {len(value)} entries, at most {limits.MAX_LOGIT_BIAS} are allowed"
            raise InvalidRequest(message, param=param)
        return {key: _shortest(item) for key, item in value.items()}
    if field.is_repeated:
        return list(value)
    if field.name == "early_stopping":
        return _early_stopping(value)
    return _shortest(value) if isinstance(value, float) else value


def _early_stopping(text: str) -> bool | str:
    if text not in _EARLY_STOPPING:
        param = API_NAMES["early_stopping"]
        raise InvalidRequest(f"{param} must be one of {', '.join(_EARLY_STOPPING)}", param=param)
    return _EARLY_STOPPING[text]


def _shortest(value: float) -> float:
    """The decimal number that the client wrote: 0.7 arrives as the float32 0.699999988.

    So both APIs sample with the same numbers.
    """
    return float(f"{value:.7g}")
