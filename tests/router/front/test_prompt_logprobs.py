"""What clients are told of their prompt: echo with logprobs, `prompt_logprobs`, the prompt alone; over both APIs."""

from typing import Any

import pytest

from common.values.request import PromptLogprobs
from common.wire.pb import generation_pb2 as pb
from router.core.generation import GenerationEvent, GenerationRequest
from tests.router.front.grpc_rig import grpc_rig
from tests.router.front.http_rig import http_rig, ids
from tests.router.front.scripted_service import ScriptedService, answer
from tests.router.text.tokenizers_for_tests import BOS_ID

LONG = "The quick brown fox jumps over the lazy dög. " * 8  # more tokens than one message of a stream holds


def scoring(text: str = "yz") -> ScriptedService:
    """Token at position p has logprob -p / 8 and rank 2; the one after it in the vocabulary is more likely."""

    def script(request: GenerationRequest) -> list[GenerationEvent]:
        accepted, *rest = answer(request, ids(text)[: request.sampling.max_tokens])
        if request.num_prompt_logprobs is None:
            return [accepted, *rest]
        last = len(request.token_ids)
        parts = [range(start, min(start + 100, last)) for start in range(1, last, 100)]
        return [accepted, *(_part(request, part) for part in parts), *rest]

    return ScriptedService(script)


def _part(request: GenerationRequest, part: range) -> PromptLogprobs:
    own = [request.token_ids[position] for position in part]
    assert request.num_prompt_logprobs is not None
    top = [[(token_id + 1, -0.0625), (token_id, -0.5)][: request.num_prompt_logprobs] for token_id in own]
    return PromptLogprobs(
        part.start,
        tuple(-position / 8 for position in part),
        (2,) * len(part),
        tuple(each for pairs in top for each, _ in pairs),
        tuple(logprob for pairs in top for _, logprob in pairs),
    )


async def test_echo_with_logprobs_has_the_form_of_openai() -> None:
    async with http_rig(scoring()) as rig:
        whole = await rig.openai.completions.create(model="tiny", prompt=ids("wx"), echo=True, logprobs=1, max_tokens=2)
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == ("wxyz", "length")
    assert choice.logprobs.tokens == ["w", "x", "y", "z"]
    assert choice.logprobs.token_logprobs == [None, -0.125, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"y": -0.0625, "x": -0.125}, {"y": -0.5}, {"z": -0.5}]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]


async def test_the_prompt_alone_is_answered_without_a_token() -> None:
    """max_tokens 0, as evaluations ask: several prompts, choices, and as token ids."""
    arguments = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 0}
    async with http_rig(scoring()) as rig:
        for prompt, num_added in ((["wx", "abc"], 1), ([ids("wx"), ids("abc")], 0)):
            whole = await rig.openai.completions.create(prompt=prompt, n=2, **arguments)
            assert [choice.text for choice in whole.choices] == ["wx", "wx", "abc", "abc"]
            for choice in whole.choices:
                expected = [None, *(-position / 8 for position in range(1, len(choice.text) + num_added))]
                assert choice.logprobs.token_logprobs == expected
            assert whole.choices[0].logprobs.top_logprobs is None
            assert {choice.finish_reason for choice in whole.choices} == {"length"}
            assert whole.usage.completion_tokens == 0
        refused = await rig.post("/v1/completions", {"prompt": "wx", "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_streamed_echo_is_the_whole_one_in_parts(max_tokens: int) -> None:
    arguments = {"model": "tiny", "prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    async with http_rig(scoring()) as rig:
        whole = await rig.openai.completions.create(**arguments)
        stream = await rig.openai.completions.create(**arguments, stream=True)
        parts = [choice async for chunk in stream for choice in chunk.choices]
    for choice in whole.choices:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        logprobs = [part.logprobs for part in own if part.logprobs]
        assert max(len(each.tokens) for each in logprobs) <= 256
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for each in logprobs for value in getattr(each, column) or []]
            assert streamed == getattr(choice.logprobs, column)
        shown = [part.logprobs.text_offset[0] for part in own if part.logprobs and part.logprobs.text_offset]
        assert [choice.text[offset : offset + 1] for offset in shown[:2]] == [own[0].text[:1], own[1].text[:1]]


async def test_offsets_point_at_the_tokens_text_whatever_is_around_it() -> None:
    """A character of two tokens, and a token in front that is not the client's text."""
    async with http_rig(scoring()) as rig:
        body = {"prompt": "aéb", "echo": True, "logprobs": 0, "max_tokens": 0}
        plain = (await rig.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
        with_ids = (await rig.post("/v1/completions", {**body, "prompt": [BOS_ID, *ids("aéb")]})).json()["choices"][0]
    assert plain["tokens"][0] == "<s>"
    assert plain["text_offset"] == [0, 0, 1, 1, 2]
    assert with_ids["text"] == "<s>aéb"
    assert with_ids["logprobs"]["text_offset"] == [0, 3, 4, 4, 5]


async def test_prompt_logprobs_have_the_form_of_vllm() -> None:
    _, second = ids("wx")
    entry = {
        str(second): {"logprob": -0.125, "rank": 2, "decoded_token": "x"},
        str(second + 1): {"logprob": -0.0625, "rank": 1, "decoded_token": "y"},
    }
    async with http_rig(scoring()) as rig:
        body: dict[str, Any] = {"prompt": ids("wx"), "prompt_logprobs": 1, "max_tokens": 1}
        completion = (await rig.post("/v1/completions", body)).json()
        own = (await rig.post("/v1/completions", {**body, "prompt_logprobs": 0, "n": 2})).json()
        both = (await rig.post("/v1/completions", {**body, "echo": True, "logprobs": 2})).json()["choices"][0]
        chat = {"messages": [{"role": "user", "content": "wx"}], "prompt_logprobs": 1}
        conversation = (await rig.post("/v1/chat/completions", chat)).json()
        refused = await rig.post("/v1/completions", {**body, "stream": True})
    assert completion["choices"][0]["prompt_logprobs"] == [None, entry]
    assert completion["choices"][0]["logprobs"] is None
    for choice in own["choices"]:
        assert choice["prompt_logprobs"] == [None, {str(second): entry[str(second)]}]
    assert both["prompt_logprobs"] == [None, entry]
    assert both["logprobs"]["top_logprobs"][1] == {"y": -0.0625, "x": -0.125}
    assert len(conversation["prompt_logprobs"]) == conversation["usage"]["prompt_tokens"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_without_the_field_nothing_is_computed_and_nothing_said() -> None:
    service = scoring()
    async with http_rig(service) as rig:
        reply = await rig.post("/v1/completions", {"prompt": "wx", "echo": True})
        chat = await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "wx"}]})
    assert [request.num_prompt_logprobs for request in service.submitted] == [None, None]
    assert "prompt_logprobs" not in reply.json()["choices"][0]
    assert "prompt_logprobs" not in chat.json()


async def test_grpc_tells_them_in_the_first_chunks_of_a_choice() -> None:
    """Those of a long prompt in several messages, all before any output; for each choice."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids(LONG)), stream=True)
    request.output.prompt_logprobs, request.output.echo = 1, True
    request.sampling.n, request.stop.max_tokens = 2, 2
    async with grpc_rig(scoring()) as rig:
        streamed = await rig.generate(request)
        request.stream, request.output.echo, request.stop.max_tokens = False, False, 0
        alone = await rig.generate(request)
    for index in (0, 1):
        chunks = [message.chunk for message in streamed if message.HasField("chunk") and message.chunk.index == index]
        with_scores = [chunk for chunk in chunks if chunk.prompt_logprobs]
        assert chunks[: len(with_scores)] == with_scores and len(with_scores) > 1
        assert (with_scores[0].text, list(with_scores[0].token_ids)) == (LONG, ids(LONG))
        _check_tokens([each for chunk in with_scores for each in chunk.prompt_logprobs])
        assert "".join(chunk.text for chunk in chunks) == LONG + "yz"
    chunks = [message.chunk for message in alone if message.HasField("chunk") and message.chunk.index == 0]
    _check_tokens([each for chunk in chunks for each in chunk.prompt_logprobs])
    assert not any(chunk.text or chunk.token_ids for chunk in chunks)
    assert {message.finished.usage.completion_tokens for message in alone if message.HasField("finished")} == {0}


def _check_tokens(entries: list[pb.TokenLogprobs]) -> None:
    assert [entry.token_id for entry in entries] == ids(LONG)
    assert not entries[0].HasField("logprob")
    assert [entry.logprob for entry in entries[1:]] == [-position / 8 for position in range(1, len(entries))]
    assert [(top.token_id, top.logprob) for top in entries[1].top] == [(ids(LONG)[1] + 1, -0.0625)]
