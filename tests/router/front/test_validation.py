"""The table of ranges, and what a request becomes for the workers."""

import dataclasses
import math
import random
from typing import Any

import pytest

from common.checkpoint.hf_checkpoint import GENERATION_RANGES
from common.values.errors import InvalidRequest
from common.values.ids import RequestId
from common.values.request import SamplingParams
from router.request.served_model import ServedModel
from router.request.spec import RANGES, ChatPrompt, RequestSpec, Stated, TextPrompt
from router.request.validation import Validator, ValidRequest
from router.tenants.tenants import Tenant
from tests.router.front.http_rig import MODEL, ids


def validate(spec: RequestSpec, model: ServedModel = MODEL, num_tokens: int = 3) -> ValidRequest:
    return Validator(model, 10.0, random.Random(1), ids).validate(spec, [65] * num_tokens, RequestId("r"), Tenant(""))


def sampled(model: ServedModel = MODEL, **fields: Any) -> SamplingParams:
    apart = {name: fields.pop(name, None) for name in ("max_tokens", "num_logprobs")}
    return validate(RequestSpec(TextPrompt("x"), Stated(**fields), **apart), model).generation.sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("presence_penalty", value) for value in (-2.0, 2.0, 0.0)],
        *[("frequency_penalty", value) for value in (-2.0, 2.0)],
        *[("repetition_penalty", value) for value in (0.01, 1.0, 100.0)],
        *[("temperature", value) for value in (0.0, 0.7, 2.0)],
        *[("top_p", value) for value in (1e-6, 1.0)],
        *[("min_p", value) for value in (0.0, 1.0)],
        *[("top_k", value) for value in (1, 299)],
    ],
)
def test_values_within_range_are_passed_on(field: str, value: float) -> None:
    fields: dict[str, Any] = {field: value}
    assert getattr(sampled(**fields), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("presence_penalty", value) for value in (-2.01, 2.01, float("nan"), float("inf"))],
        *[("frequency_penalty", value) for value in (-2.01, 2.01)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, 1e-320, float("inf"), float("nan"))],
        *[("temperature", value) for value in (1e308, -0.1, float("nan"), 2.01)],
        *[("top_p", value) for value in (0.0, 1.0001, -1.0, float("nan"))],
        *[("min_p", value) for value in (-0.1, 1.1)],
        ("top_k", -2),
        *[("seed", value) for value in (2**63, -(2**63) - 1)],
        *[("num_logprobs", value) for value in (-1, 21)],
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest) as refused:
        sampled(**fields)
    assert refused.value.param == {"num_logprobs": "logprobs"}.get(field, field)


def test_edges_become_their_meaning() -> None:
    assert sampled(temperature=1e-320).temperature == 0.0
    assert str(sampled(temperature=-0.0).temperature) == "0.0"
    assert [sampled(top_k=value).top_k for value in (-1, 0, 10**9, 300)] == [0, 0, 0, 0]
    assert sampled(seed=-1).seed == 2**64 - 1


def test_a_seed_is_drawn_when_none_is_stated() -> None:
    validator = Validator(MODEL, 10.0, random.Random(1), ids)
    spec = RequestSpec(TextPrompt("x"))
    seeds = {validator.validate(spec, [65], RequestId("r"), Tenant("")).generation.sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_core_hears_whose_request_it_is() -> None:
    spec = RequestSpec(TextPrompt("x"))
    request = Validator(MODEL, 10.0, random.Random(1), ids).validate(spec, [65], RequestId("r"), Tenant("acme"))
    assert request.generation.tenant == "acme"


def test_the_models_advice_applies_where_the_client_says_nothing() -> None:
    advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7}
    model = dataclasses.replace(MODEL, generation_defaults=advice)
    advised = sampled(model, top_p=0.5)
    assert (advised.temperature, advised.top_p, advised.top_k, advised.repetition_penalty) == (0.6, 0.5, 20, 1.1)
    assert advised.max_tokens == 7
    plain = sampled()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens) == (1.0, 1.0, 0, 16)


def test_a_models_advice_may_be_what_a_request_may_state() -> None:
    for name, (low, high, _) in GENERATION_RANGES.items():
        if name != "max_new_tokens":
            allowed = RANGES[name]
            assert allowed.holds(low) and not allowed.holds(math.nextafter(low, -math.inf))
            assert allowed.high == high


def test_a_bad_word_is_kept_out_at_the_beginning_of_a_text_and_after_a_space() -> None:
    vocabulary = {"dog": [1], " dog": [2], "hotdog": [3, 1], " hotdog": [4, 1], "the dog": [5, 2], " the dog": [5, 2]}
    validator = Validator(MODEL, 10.0, random.Random(1), vocabulary.__getitem__)
    spec = RequestSpec(TextPrompt("x"), Stated(bad_words=["dog", " hotdog", "the dog", "dog"]))
    sampling = validator.validate(spec, [65], RequestId("r"), Tenant("")).generation.sampling
    assert sampling.bad_words == ((1,), (2,), (3, 1), (4, 1), (5, 2))


@pytest.mark.parametrize("words", [["x"] * 65, ["x" * 65], [""], [" "]])
def test_bad_words_are_bounded(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="bad_words"):
        sampled(bad_words=words)


def test_bad_words_leave_a_token_to_draw() -> None:
    """Else nothing could be drawn, and the client would get an error of ours."""
    x, y = ids("xy")
    assert sampled(bad_words=["x", "xx"], allowed_token_ids=[x, y]).bad_words == ((x,), (x, x))
    with pytest.raises(InvalidRequest, match="bad_words may forbid every token"):
        sampled(bad_words=["yx", "y"], allowed_token_ids=[x, y])
    with pytest.raises(InvalidRequest, match="bad_words may forbid every token"):
        sampled(bad_words=["x"], allowed_token_ids=[x, y], stop_token_ids=[y], min_tokens=1)


def test_min_tokens_need_a_token_that_does_not_end_the_answer() -> None:
    """Else nothing could be drawn, and the client would get an error of ours."""
    eos = MODEL.eos_token_ids[0]
    for allowed, stop_ids, is_fine in (([eos], [], False), ([5, 6], [6, 5], False), ([5, eos], [], True)):
        fields = {"max_tokens": 8, "min_tokens": 3, "allowed_token_ids": allowed, "stop_token_ids": stop_ids}
        if is_fine:
            assert sampled(**fields).allowed_token_ids == tuple(allowed)
        else:
            with pytest.raises(InvalidRequest, match="allowed_token_ids"):
                sampled(**fields)


def test_min_tokens_up_to_max_tokens() -> None:
    assert sampled(min_tokens=5, max_tokens=8).min_tokens == 5
    assert sampled(min_tokens=8, max_tokens=8).min_tokens == 8
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sampled(min_tokens=5, max_tokens=3)


def test_the_models_end_tokens_stop_unless_ignored() -> None:
    assert sampled(stop_token_ids=[9, 1]).stop_token_ids == (*MODEL.eos_token_ids, 9)
    assert sampled(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("default", "num_prompt_tokens", "stated", "tokens"),
    [(0, 500, None, 12), (64, 3, None, 64), (64, 500, None, 12), (64, 3, 400, 400)],
)
def test_a_chat_that_states_no_max_tokens_gets_the_settings_within_the_context(
    default: int, num_prompt_tokens: int, stated: int | None, tokens: int
) -> None:
    validator = Validator(MODEL, 10.0, random.Random(1), ids, default)
    chat = RequestSpec(ChatPrompt(({"role": "user", "content": "x"},)), max_tokens=stated)
    request = validator.validate(chat, [65] * num_prompt_tokens, RequestId("r"), Tenant(""))
    assert request.generation.sampling.max_tokens == tokens


def test_an_unknown_model_is_named() -> None:
    validator = Validator(MODEL, 10.0, random.Random(1), ids)
    validator.check_model("")
    validator.check_model("tiny")
    with pytest.raises(InvalidRequest, match="'big'"):
        validator.check_model("big")


def test_the_clients_deadline_replaces_the_default() -> None:
    spec = RequestSpec(TextPrompt("x"))
    assert validate(spec).generation.deadline_s == 10.0
    assert validate(dataclasses.replace(spec, deadline_s=2.5)).generation.deadline_s == 2.5
