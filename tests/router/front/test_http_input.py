"""Bad input over HTTP: a clear 4xx in OpenAI's form that names the field, and nothing reaches the service."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from router.core.generation import GenerationRequest
from router.request import limits
from tests.router.front.http_rig import MODEL, SETTINGS, HttpRig, http_rig, ids
from tests.router.front.scripted_service import ScriptedService, always

USER = [{"role": "user", "content": "hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: HttpRig) -> HttpRig:
    """One server for all tests here; each finds the service's memory empty."""
    submitted_to(shared_rig).clear()
    return shared_rig


def submitted_to(rig: HttpRig) -> list[GenerationRequest]:
    service = rig.frontend.service
    assert isinstance(service, ScriptedService)
    return service.submitted


async def refused(rig: HttpRig, raw: bytes | dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """The error of a request that must be refused with 400; afterwards a good request works."""
    body = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    before = len(submitted_to(rig))
    reply = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(reply.content) < 1000
    assert len(submitted_to(rig)) == before
    assert (await rig.post("/v1/completions", {"prompt": "canary"})).status_code == 200
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", ["0", "-1", '"5"', "5.0", "true", "1" + "0" * 30, "1" * 5000])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_must_be_a_positive_integer(rig: HttpRig, name: str, value: str) -> None:
    path = "/v1/chat/completions" if name == "max_completion_tokens" else "/v1/completions"
    prompt = f'"messages": {json.dumps(USER)}' if "chat" in path else '"prompt": "x"'
    error = await refused(rig, f'{{{prompt}, "{name}": {value}}}'.encode(), path)
    assert error["param"] == name


async def test_null_means_not_stated(rig: HttpRig) -> None:
    body = {"prompt": "x", "max_tokens": None, "temperature": None, "stop": None, "n": None, "tools_": None}
    del body["tools_"]
    assert (await rig.post("/v1/completions", body)).status_code == 200
    assert submitted_to(rig)[0].sampling.max_tokens == 16


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias"],
)
async def test_numbers_must_be_finite(rig: HttpRig, name: str, value: str) -> None:
    stated = f'{{"65": {value}}}' if name == "logit_bias" else value
    error = await refused(rig, f'{{"prompt": "x", "{name}": {stated}}}'.encode())
    assert error["param"].startswith(name)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [[]]},
        {"prompt": None},
        {},
        {"prompt": [{}]},
        {"prompt": ["a", 1]},
        {"prompt": ["a"] * 65},
    ],
)
async def test_an_empty_prompt_is_refused(rig: HttpRig, body: dict[str, Any]) -> None:
    assert (await refused(rig, body))["param"].startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user", "content": None}], [{"role": "user"}], None, [{"role": "user", "content": []}][:0]],
)
async def test_messages_without_content_are_refused(rig: HttpRig, messages: object) -> None:
    error = await refused(rig, {"messages": messages}, "/v1/chat/completions")
    assert error["param"].startswith("messages")


async def test_empty_content_is_a_prompt_of_the_template_alone(rig: HttpRig) -> None:
    reply = await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]})
    assert reply.status_code == 200
    assert len(submitted_to(rig)[0].token_ids) > 0


@pytest.mark.parametrize(
    "prompt", [[-1], [300], [2**31], [2**63], [2**70], [1.5], [True], [65, "a"], [[65], [300]], [[65], [True]]]
)
async def test_token_ids_must_be_in_the_vocabulary(rig: HttpRig, prompt: list[object]) -> None:
    assert (await refused(rig, {"prompt": prompt}))["param"].startswith("prompt")


@pytest.mark.parametrize(
    "bias",
    [
        *[{"-1": 1}, {"300": 1}, {"abc": 1}, {"1.5": 1}, {"²": 1}, {"65": 101}, {"65": True}, {"065": 1}],
        {str(token_id): 1 for token_id in range(301)},
    ],
)
async def test_logit_bias_must_name_tokens(rig: HttpRig, bias: dict[str, object]) -> None:
    assert (await refused(rig, {"prompt": "x", "logit_bias": bias}))["param"].startswith("logit_bias")


@pytest.mark.parametrize(("num_tokens", "status"), [(510, 200), (511, 200), (512, 400), (513, 400), (5000, 400)])
async def test_prompt_and_output_must_fit_the_context(rig: HttpRig, num_tokens: int, status: int) -> None:
    reply = await rig.post("/v1/completions", {"prompt": [65] * num_tokens, "max_tokens": 1})
    assert reply.status_code == status
    if status == 400:
        assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_prompt_beyond_the_context_is_told_in_tokens_and_one_within_is_never_too_large(path: str) -> None:
    model = replace(MODEL, max_model_len=40_000)
    settings = replace(SETTINGS, max_body_bytes=model.max_body_bytes)
    assert model.max_body_bytes > 2 << 20
    async with http_rig(always(ids("ok")), settings, model) as rig:
        for num_tokens, status in ((39_000, 200), (2_000_000, 200 if path == "/tokenize" else 400)):
            text = "x" * num_tokens
            body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
            reply = await rig.post(path, body)
            assert reply.status_code == status
            if status == 400:
                assert reply.json()["error"]["code"] == "context_length_exceeded"
                assert "the prompt has 2000" in reply.json()["error"]["message"]


async def test_a_small_context_still_allows_a_body_of_a_mebibyte() -> None:
    assert replace(MODEL, max_model_len=512).max_body_bytes == 1 << 20


async def test_only_a_default_is_clipped_to_the_context(rig: HttpRig) -> None:
    await rig.post("/v1/completions", {"prompt": [65] * 508})
    await rig.post("/v1/chat/completions", {"messages": USER})
    too_many = await refused(rig, {"prompt": [65] * 508, "max_tokens": 5})
    clipped, chat, _ = submitted_to(rig)
    assert clipped.sampling.max_tokens == 4
    assert chat.sampling.max_tokens == 512 - len(chat.token_ids)
    assert (too_many["code"], too_many["param"]) == ("context_length_exceeded", "max_tokens")


async def test_an_unknown_field_is_refused_with_the_nearest_name(rig: HttpRig) -> None:
    error = await refused(rig, {"prompt": "x", "temprature": 0})
    assert error["param"] == "temprature" and "did you mean 'temperature'?" in error["message"]
    nested = await refused(rig, {"messages": [{"role": "user", "content": "x", "x" * 5000: 1}]}, "/v1/chat/completions")
    assert nested["param"].startswith("messages[0].xxx")


@pytest.mark.parametrize(
    "internal",
    [
        {"kv_transfer_params": {"tp_size": 10**9, "remote_host": "127.0.0.1", "remote_port": 22}},
        {"request_id": "mine"},
        {"priority": -999},
        {"data_parallel_rank": 1},
        {"worker_id": "decode-0"},
        {"cache_salt": "s" * 129},
    ],
)
async def test_internal_fields_are_refused(rig: HttpRig, internal: dict[str, Any]) -> None:
    assert (await refused(rig, {"prompt": "x", **internal}))["param"] in internal


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", True), ("stream", "yes"), ("temperature", "0.5"), ("n", "2"), ("stop", [1])]
)
async def test_types_are_strict(rig: HttpRig, name: str, value: object) -> None:
    assert (await refused(rig, {"prompt": "x", name: value}))["param"].startswith(name)


async def test_of_a_key_given_twice_the_last_counts(rig: HttpRig) -> None:
    body = b'{"prompt": "x", "max_tokens": 3, "max_tokens": 4}'
    reply = await rig.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert submitted_to(rig)[0].sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"messages": USER, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": USER, "top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": USER, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"messages": USER, "n": 9}, "n"),
        ({"messages": USER, "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"messages": USER, "stop": ["x" * 65]}, "stop"),
        ({"messages": USER, "stop": ""}, "stop"),
        ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": USER, "max_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": USER, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_limits_of_a_chat(rig: HttpRig, body: dict[str, Any], param: str) -> None:
    assert (await refused(rig, body, "/v1/chat/completions"))["param"].startswith(param)


async def test_logprobs_without_alternatives_are_fine(rig: HttpRig) -> None:
    reply = await rig.post("/v1/chat/completions", {"messages": USER, "logprobs": True})
    assert reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_in_a_large_body_the_field_is_not_looked_for(rig: HttpRig) -> None:
    """A megabyte of numbers with a NaN after them stopped the event loop for seconds."""
    body = b'{"prompt": [' + b"1," * (limits.MAX_EXPLAINED_BYTES // 2) + b"NaN]}"
    error = await refused(rig, body)
    assert error["param"] is None
    assert "no valid JSON" in error["message"]


@pytest.mark.parametrize("value", [[0] * limits.MAX_TEMPLATE_VALUES, {f"k{n}": [0] for n in range(3000)}])
async def test_the_templates_arguments_are_bounded(rig: HttpRig, value: object) -> None:
    error = await refused(rig, {"messages": USER, "chat_template_kwargs": {"x": value}}, "/v1/chat/completions")
    assert error["param"] == "chat_template_kwargs"
    assert "4096" in error["message"]


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_lone_surrogate_is_refused_by_name(rig: HttpRig, stream: str) -> None:
    prompt = f'{{"prompt": "a\\ud800b", "stream": {stream}}}'.encode()
    chat = f'{{"messages": [{{"role": "user", "content": "a\\ud800b"}}], "stream": {stream}}}'.encode()
    assert (await refused(rig, prompt))["param"] == "prompt"
    assert (await refused(rig, chat, "/v1/chat/completions"))["param"] == "messages[0].content"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"} {}',
        b"{'prompt': 'x'}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
async def test_what_is_no_json_object_is_refused(rig: HttpRig, body: bytes) -> None:
    await refused(rig, body)


async def test_deep_template_arguments_are_refused(rig: HttpRig) -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    error = await refused(rig, {"messages": USER, "chat_template_kwargs": {"x": deep}}, "/v1/chat/completions")
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
async def test_only_plain_json_is_read(rig: HttpRig, path: str, headers: dict[str, str]) -> None:
    reply = await rig.client.post(path, content=b"--x\r\n", headers=headers)
    assert reply.status_code == 415
    assert reply.json()["error"]["code"] == "unsupported_media_type"


async def test_ranges_are_ignored(rig: HttpRig) -> None:
    ranges = "bytes=" + ",".join(["0-"] * 1000)
    reply = await rig.client.get("/v1/models", headers={"range": ranges})
    assert reply.status_code == 200


@pytest.mark.parametrize("num_bytes", [(1 << 20) + 1, 50 << 20])
async def test_too_large_a_body_is_refused(rig: HttpRig, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The answer is seen although the client sends all of it: on a busy machine that takes longer than the server
    usually waits."""
    monkeypatch.setattr(limits, "DISCARD_TIMEOUT_S", 60.0)
    body = b'{"prompt": "' + b"x" * num_bytes
    reply = await rig.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"


async def test_an_endless_body_is_cut(rig: HttpRig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n")

    async def send_for_ever() -> None:
        while True:
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
            await writer.drain()

    sending = asyncio.ensure_future(send_for_ever())
    try:
        status = await asyncio.wait_for(reader.readline(), 60)
    except ConnectionResetError:
        status = b""  # a reset, for what was sent after the answer, may overtake the answer
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(sending, 60)
    writer.close()
    assert status == b"" or status.startswith(b"HTTP/1.1 413")


async def test_a_body_of_exactly_the_limit_is_read(rig: HttpRig) -> None:
    body = b'{"prompt": "x"}'.ljust(1 << 20)
    reply = await rig.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "0", "-1", "1e9", "1_0"])
async def test_the_timeout_header_must_be_seconds(rig: HttpRig, value: str) -> None:
    reply = await rig.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout-s": value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "x-request-timeout-s"
