"""The `openai` package against our HTTP front end, unchanged."""

import openai
import pytest

from common.values.errors import NoReadyPair, Overloaded
from common.values.request import FinishReason
from router.core.generation import GenerationRequest
from tests.router.front.http_rig import http_rig, ids
from tests.router.front.scripted_service import ScriptedService, always, answer, failing, tokens
from tests.router.text.tokenizers_for_tests import EOS_ID, IM_END_ID

HELLO = "Héllo 😀"
MESSAGES = [{"role": "user", "content": "Say hello"}]


def hello() -> ScriptedService:
    return always([*ids(HELLO), IM_END_ID], FinishReason.STOP)


async def test_chat_completion() -> None:
    service = hello()
    async with http_rig(service) as rig:
        answer = await rig.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", HELLO, "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(service.submitted[0].token_ids)
    assert answer.usage.completion_tokens == len(ids(HELLO)) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_streamed_chat_has_role_text_reason_and_usage_in_order() -> None:
    async with http_rig(hello()) as rig:
        stream = await rig.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_completion_with_logprobs_and_token_ids() -> None:
    async with http_rig(always(ids("ab"))) as rig:
        answer = await rig.openai.completions.create(
            model="tiny", prompt="x", max_tokens=2, logprobs=1, extra_body={"return_token_ids": True}
        )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1]
    assert choice.logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}]
    assert choice.model_dump()["token_ids"] == ids("ab")


async def test_chat_logprobs_carry_bytes_and_alternatives() -> None:
    async with http_rig(always(ids("é"))) as rig:
        answer = await rig.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
        )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9]]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -2.0]


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    arguments = {"model": "tiny", "prompt": "x", "max_tokens": 9, "logprobs": 2}
    async with http_rig(always(ids("한😀ab"))) as rig:
        whole = (await rig.openai.completions.create(**arguments)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await rig.openai.completions.create(**arguments, stream=True)]
    assert whole.logprobs is not None
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [token for part in streamed for token in part.tokens or []] == whole.logprobs.tokens
    assert [offset for part in streamed for offset in part.text_offset or []] == whole.logprobs.text_offset
    assert [top for part in streamed for top in part.top_logprobs or []] == whole.logprobs.top_logprobs


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    def script(request: GenerationRequest) -> list:  # type: ignore[type-arg]
        return answer(request, [request.token_ids[-1], EOS_ID], FinishReason.STOP)

    service = ScriptedService(script)
    arguments = {"model": "tiny", "prompt": ["1", "2", "3"], "n": 2}
    async with http_rig(service) as rig:
        whole = await rig.openai.completions.create(**arguments)
        texts = [""] * 6
        async for chunk in await rig.openai.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == ["1", "1", "2", "2", "3", "3"] == texts
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 12)
    assert len({request.request_id for request in service.submitted}) == 6


async def test_choices_that_differ_in_length_each_end_once() -> None:
    def script(request: GenerationRequest) -> list:  # type: ignore[type-arg]
        full = answer(request, ids("x"))
        return [full[0], *tokens([ids("ab"), ids("c"), ids("def")]), full[-1]]

    async with http_rig(ScriptedService(script)) as rig:
        stream = await rig.openai.completions.create(model="tiny", prompt="p", n=3, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    texts = {idx: "".join(choice.text for choice in choices if choice.index == idx) for idx in range(3)}
    assert texts == {0: "ab", 1: "c", 2: "def"}
    assert sorted(choice.index for choice in choices if choice.finish_reason) == [0, 1, 2]


async def test_echo_repeats_the_prompt_before_the_answer() -> None:
    async with http_rig(always(ids("yz"))) as rig:
        for prompt in ("wx", ids("wx")):
            whole = await rig.openai.completions.create(model="tiny", prompt=prompt, echo=True)
            stream = await rig.openai.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
            assert whole.choices[0].text == "wxyz"
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "wxyz"


async def test_a_stop_string_ends_the_answer_and_the_work() -> None:
    service = always(ids("alpha END omega"))
    async with http_rig(service) as rig:
        raw = await rig.openai.completions.with_raw_response.create(model="tiny", prompt="x", stop=["ND o"])
        completion = raw.parse()
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason) == ("alpha E", "stop")
    assert choice.model_dump()["stop_reason"] == "ND o"
    assert completion.usage is not None and completion.usage.completion_tokens == len("alpha END o")
    assert service.stopped == [(service.submitted[0].request_id, 0)]


async def test_headers_say_where_a_request_ran_and_for_how_long() -> None:
    async with http_rig(hello()) as rig:
        raw = await rig.openai.chat.completions.with_raw_response.create(
            model="tiny",
            messages=MESSAGES,
            extra_headers={"X-Request-Id": "mine-1"},
            extra_body={"return_timings": True},
        )
        streamed = await rig.client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-pdserve-prefill-worker"] == "prefill-0"
    assert raw.headers["x-pdserve-decode-worker"] == "decode-0"
    assert raw.headers["x-pdserve-cached-tokens"] == "3"
    timing = dict(part.split(";dur=") for part in raw.headers["server-timing"].split(", "))
    assert timing == {"route": "1", "queue": "2", "prefill": "30", "kv": "4", "decode_queue": "5", "decode": "100"}
    metrics = raw.parse().model_dump()["metrics"]
    assert metrics["wall_ms"] == pytest.approx(sum(float(value) for value in timing.values()))
    assert (metrics["kv_overlap_ratio"], metrics["retries"]) == (0.8, 1)
    assert streamed.headers["x-pdserve-decode-worker"] == "decode-0"
    assert streamed.headers["x-request-id"].startswith("req-")


async def test_models_are_listed_with_their_context() -> None:
    async with http_rig(hello()) as rig:
        [card] = (await rig.openai.models.list()).data
        same = await rig.openai.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError):
            await rig.openai.models.retrieve("other")
    assert card == same
    assert (card.id, card.object, card.model_dump()["max_model_len"]) == ("tiny", "model", 512)


async def test_errors_have_the_types_that_the_client_expects() -> None:
    async with http_rig(hello()) as rig:
        with pytest.raises(openai.BadRequestError) as bad:
            await rig.openai.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(openai.NotFoundError) as missing:
            await rig.openai.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.BadRequestError) as too_long:
            await rig.openai.completions.create(model="tiny", prompt=[7] * 600, max_tokens=1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert (missing.value.code, missing.value.type) == ("model_not_found", "not_found_error")
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_service_keeps_its_status_streaming_or_not(stream: bool) -> None:
    for error in (Overloaded("queue full", retry_after_s=2.0), NoReadyPair("no decode worker")):
        async with http_rig(failing(error)) as rig:
            with pytest.raises(openai.InternalServerError) as refused:
                await rig.openai.completions.create(model="tiny", prompt="x", stream=stream)
        assert refused.value.status_code == 503
        assert refused.value.code == error.code
        if error.retry_after_s:
            assert refused.value.response.headers["retry-after"] == "2"
