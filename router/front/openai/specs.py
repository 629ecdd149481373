"""What a body of the OpenAI API asks for, as a `RequestSpec`. Pure: no IO. Ranges are left to `validation`."""

import dataclasses
from collections.abc import Mapping

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import refuse_unsupported
from router.front.openai.prompts import chat_prompt, prompts_of
from router.front.openai.requests import ChatBody, CompletionBody, GenerationBody
from router.request.spec import (
    Prompt,
    RequestSpec,
    RoutingSpec,
    SamplingSpec,
    StopSpec,
)

_SHARED_UNSUPPORTED = (
    *("allowed_tools", "bad_words", "best_of", "documents", "length_penalty", "metadata", "prompt_logprobs"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("return_tokens_as_token_ids", "service_tier", "session_id", "spaces_between_special_tokens", "store"),
    *("stream_interval", "truncate_prompt_tokens", "use_beam_search", "request_id"),
)
_COMPLETION_UNSUPPORTED = (*_SHARED_UNSUPPORTED, "suffix")
_CHAT_UNSUPPORTED = (
    *_SHARED_UNSUPPORTED,
    *("audio", "chat_template", "continue_final_message", "function_call", "functions", "include_reasoning"),
    *("modalities", "parallel_tool_calls", "prediction", "reasoning_effort", "tool_choice", "tools", "verbosity"),
    "web_search_options",
)


def completion_specs(body: CompletionBody, deadline_s: float | None) -> list[RequestSpec]:
    """One request per prompt."""
    refuse_unsupported(body, _COMPLETION_UNSUPPORTED)
    _check_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise Unsupported("echo together with logprobs is not supported yet", param="echo")
    first, *others = prompts_of(body)
    spec = _spec(body, first, body.max_tokens, body.logprobs, deadline_s)
    if body.echo:
        spec = dataclasses.replace(spec, echo=True)
    return [spec, *[dataclasses.replace(spec, prompt=prompt) for prompt in others]]


def chat_spec(body: ChatBody, deadline_s: float | None) -> RequestSpec:
    refuse_unsupported(body, _CHAT_UNSUPPORTED)
    _check_stream_options(body)
    max_tokens, max_tokens_name = _chat_max_tokens(body)
    prompt = chat_prompt(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
    spec = _spec(body, prompt, max_tokens, _chat_logprobs(body), deadline_s)
    names = {"prompt": "messages", "max_tokens": max_tokens_name, "logprobs": "top_logprobs", **spec.api_names}
    return dataclasses.replace(spec, api_names=names)


def _spec(
    body: GenerationBody, prompt: Prompt, max_tokens: int | None, num_logprobs: int | None, deadline_s: float | None
) -> RequestSpec:
    return RequestSpec(
        model=body.model or "",
        prompt=prompt,
        num_choices=1 if body.n is None else body.n,
        sampling=_sampling(body, num_logprobs),
        stop=_stop(body, max_tokens),
        routing=RoutingSpec(priority=body.priority or 0, cache_salt=body.cache_salt or "", deadline_s=deadline_s),
        skip_special_tokens=body.skip_special_tokens is not False,
        api_names={"deadline": "x-request-timeout-s"},
    )


def _sampling(body: GenerationBody, num_logprobs: int | None) -> SamplingSpec:
    return SamplingSpec(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        num_logprobs=num_logprobs,
    )


def _stop(body: GenerationBody, max_tokens: int | None) -> StopSpec:
    return StopSpec(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
    )


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON has only strings as keys; they must spell plain decimal numbers, each in the one way."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
            raise InvalidRequest(f"logit_bias holds {key[:32]!r}, which is no token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
    refuse_unsupported(body.stream_options, ("continuous_usage_stats", "include_obfuscation"), "stream_options.")


def _chat_max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The value, and under which of its two names it was stated."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; state one", param="max_completion_tokens")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return 0 if body.top_logprobs is None else body.top_logprobs
    if body.top_logprobs is not None:
        raise InvalidRequest("top_logprobs is only allowed with logprobs", param="top_logprobs")
    return None
