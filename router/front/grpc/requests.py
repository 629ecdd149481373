"""What a `GenerateRequest` asks for, as a `RequestSpec`. Pure: no IO. Ranges are left to `validation`."""

from typing import Any

import msgspec

from common.values.errors import InvalidRequest, Unsupported
from common.wire.pb import generation_pb2 as pb
from router.front.openai.prompts import check_template_kwargs
from router.request import limits
from router.request.spec import (
    ChatPrompt,
    Prompt,
    RequestSpec,
    RoutingSpec,
    SamplingSpec,
    StopSpec,
    TextPrompt,
    TokenPrompt,
)
from router.text.chat_template import Message as ChatMessage
from router.text.chat_template import chat_message

_ROLES = ("system", "developer", "user", "assistant")
_SAMPLING_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
API_NAMES = {
    **{name: f"sampling.{name}" for name in (*_SAMPLING_FLOATS, "top_k", "seed", "n", "logit_bias")},
    "allowed_token_ids": "sampling.allowed_token_ids",
    "max_tokens": "stop.max_tokens",
    "min_tokens": "stop.min_tokens",
    "stop": "stop.stop",
    "stop_token_ids": "stop.stop_token_ids",
    "logprobs": "output.logprobs",
    "prefill_worker_id": "routing.prefill_worker_id",
    "decode_worker_id": "routing.decode_worker_id",
}
_PROMPT_NAMES = {"prompt": "prompt", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_template_kwargs = msgspec.json.Decoder(dict[str, Any])


def generate_spec(request: pb.GenerateRequest, deadline_s: float | None) -> RequestSpec:
    """Raises InvalidRequest."""
    _refuse_unsupported(request)
    output = request.output
    kind = request.WhichOneof("input") or ""
    return RequestSpec(
        model=request.model,
        prompt=prompt_of(request),
        num_choices=request.sampling.n if request.sampling.HasField("n") else 1,
        sampling=_sampling(request),
        stop=_stop(request.stop),
        routing=_routing(request, deadline_s),
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        return_text=output.return_text if output.HasField("return_text") else True,
        echo=output.echo,
        api_names={**API_NAMES, "prompt": _PROMPT_NAMES[kind]},
    )


def prompt_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """Whichever input is set."""
    match request.WhichOneof("input"):
        case "prompt":
            return TextPrompt(request.prompt, _adds_special_tokens(request))
        case "token_ids":
            assert isinstance(request, pb.GenerateRequest)
            return TokenPrompt(tuple(request.token_ids.ids))
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("no input is set", param="input")


def _adds_special_tokens(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    if isinstance(request, pb.TokenizeRequest) and request.HasField("add_special_tokens"):
        return request.add_special_tokens
    return True


def _chat(chat: pb.ChatInput) -> ChatPrompt:
    if chat.continue_final_message:
        raise Unsupported("chat.continue_final_message is not supported yet", param="chat.continue_final_message")
    if not 0 < len(chat.messages) <= limits.MAX_MESSAGES:
        raise InvalidRequest(f"chat.messages must hold 1 to {limits.MAX_MESSAGES} messages", param="chat.messages")
    messages = tuple(_message(message, f"chat.messages[{idx}]") for idx, message in enumerate(chat.messages))
    return ChatPrompt(messages, chat.add_generation_prompt, _kwargs(chat.chat_template_kwargs_json))


def _message(message: pb.ChatMessage, param: str) -> ChatMessage:
    if message.role not in _ROLES:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    return chat_message(message.role, message.content, message.name)


def _kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    param = "chat.chat_template_kwargs_json"
    try:
        kwargs = _template_kwargs.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{param} is no JSON object", param=param) from error
    check_template_kwargs(kwargs, param)
    return kwargs


def _sampling(request: pb.GenerateRequest) -> SamplingSpec:
    sampling = request.sampling
    return SamplingSpec(
        **{name: _optional_float(sampling, name) for name in _SAMPLING_FLOATS},
        top_k=_optional(sampling, "top_k"),
        seed=_optional(sampling, "seed"),
        logit_bias=_logit_bias(sampling),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        num_logprobs=_optional(request.output, "logprobs"),
    )


def _logit_bias(sampling: pb.SamplingParams) -> dict[int, float]:
    """Counted before it is read: 1 MiB holds 100,000 entries, and nobody is answered while they are read."""
    bias, param = sampling.logit_bias, API_NAMES["logit_bias"]
    if len(bias) > limits.MAX_LOGIT_BIAS:
        message = f"{param} holds {len(bias)} entries, at most {limits.MAX_LOGIT_BIAS} are allowed"
        raise InvalidRequest(message, param=param)
    return {token_id: _shortest(value) for token_id, value in bias.items()}


def _stop(stop: pb.StopConditions) -> StopSpec:
    return StopSpec(
        max_tokens=_optional(stop, "max_tokens"),
        min_tokens=_optional(stop, "min_tokens"),
        stop=tuple(stop.stop),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop_str_in_output,
    )


def _routing(request: pb.GenerateRequest, deadline_s: float | None) -> RoutingSpec:
    return RoutingSpec(
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline_s=deadline_s,
        prefill_worker_id=request.routing.prefill_worker_id,
        decode_worker_id=request.routing.decode_worker_id,
        force_colocated=request.routing.force_colocated,
    )


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    sampling = request.sampling
    constraint = sampling.WhichOneof("constraint")
    used = {
        f"sampling.{constraint}": constraint is not None,
        "sampling.bad_words": bool(sampling.bad_words),
        "sampling.use_beam_search": sampling.use_beam_search,
        "sampling.length_penalty": sampling.HasField("length_penalty") and sampling.length_penalty != 1.0,
        "output.prompt_logprobs": request.output.HasField("prompt_logprobs"),
        "session_id": bool(request.session_id),
    }
    for name, is_used in used.items():
        if is_used:
            raise Unsupported(f"{name} is not supported yet", param=name)


# The generated stubs know each field's name as a type of its own.
def _optional(message: Any, name: str) -> int | None:
    return int(getattr(message, name)) if message.HasField(name) else None


def _optional_float(message: Any, name: str) -> float | None:
    return _shortest(getattr(message, name)) if message.HasField(name) else None


def _shortest(value: float) -> float:
    """The decimal number that the client wrote: 0.7 arrives as the float32 0.699999988.

    So both APIs sample with the same numbers.
    """
    return float(f"{value:.7g}")
