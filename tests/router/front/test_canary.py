"""A client's words on every way that can fail, over both APIs: never in a log or a metric, and never in an answer.

What a client called a field or a model is named in its answer, so that it finds its mistake; logs do without that too.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.telemetry.metrics import Metrics
from common.values.errors import Overloaded, WorkerFailed
from common.wire.pb import generation_pb2 as pb
from router.core.generation import GenerationRequest
from tests.router.front.grpc_rig import GrpcRig, details_of, grpc_rig
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.keys_for_tests import ACME, access, bearer, key_file
from tests.router.front.raw_http import exchange
from tests.router.front.scripted_service import ScriptedService, accepted, answer, failing, tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = "CANARY-9c1"
NAME = "CANARY_name"
CHAT = [{"role": "user", "content": WORDS}]


def breaking(request: GenerationRequest) -> Any:
    raise RuntimeError(f"a bug that quotes {WORDS}")


def breaking_late(request: GenerationRequest) -> Any:
    yield from (accepted(request), *tokens([ids("ok")], None))
    raise RuntimeError(f"a bug that quotes {WORDS}")


class Rigs:
    """Both front ends over one service and one set of metrics."""

    def __init__(self, http: HttpRig, rpc: GrpcRig, metrics: Metrics) -> None:
        self.http, self.rpc, self.metrics = http, rpc, metrics

    def says(self, service: ScriptedService) -> None:
        for rig in (self.http, self.rpc):
            rig.frontend.service = service
            rig.frontend.in_flight._service = service
            rig.frontend.answers._service = service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[Rigs]:
    service, metrics = ScriptedService(lambda request: answer(request, ids("ok"))), Metrics("tiny", "router", "r")
    gate = access(key_file(limits={"max_concurrent": 8}))
    async with http_rig(service, access=gate) as http, grpc_rig(service, access=gate) as rpc:
        for rig in (http, rpc):
            rig.frontend._metrics = metrics
        yield Rigs(http, rpc, metrics)


@pytest.fixture
def rigs(started: Rigs) -> Rigs:
    started.says(ScriptedService(lambda request: answer(request, ids("ok"))))
    return started


def check(rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, reply: str) -> None:
    shown = capsys.readouterr()
    assert WORDS not in reply
    for text in (shown.out, shown.err, caplog.text, rigs.metrics.exposition().decode()):
        assert WORDS not in text
        assert NAME not in text
        assert ACME not in text
    assert "acme" not in rigs.metrics.exposition().decode()  # nor who the tenants are


BODIES: Mapping[str, dict[str, Any]] = {
    "wrong value": {"prompt": WORDS, "temperature": -1},
    "wrong type": {"prompt": WORDS, "temperature": WORDS},
    "wrong type deep": {"messages": [{"role": WORDS, "content": WORDS}]},
    "unknown field": {"prompt": WORDS, NAME: WORDS},
    "unknown field deep": {"messages": [{"role": "user", "content": WORDS, NAME: WORDS}]},
    "unsupported": {"prompt": WORDS, "suffix": WORDS},
    "unsupported schema": {"messages": CHAT, "response_format": {"type": "json_schema", "x": WORDS}},
    "unsupported template": {"messages": CHAT, "chat_template": WORDS},
    "template arguments": {"messages": CHAT, "chat_template_kwargs": {"messages": WORDS}},
    "content part": {"messages": [{"role": "user", "content": [{"type": WORDS, "text": WORDS}]}]},
    "url": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": WORDS}}]}]},
    "special token": {"messages": [{"role": "user", "content": f"<|image_pad|><|im_start|>{WORDS}"}], "n": 99},
    "too long": {"prompt": WORDS * 100},
    "too many tokens": {"prompt": WORDS, "max_tokens": 10**6},
    "no such model": {"prompt": WORDS, "model": NAME},
    "stop": {"prompt": WORDS, "stop": [WORDS] * 9},
    "bias": {"prompt": WORDS, "logit_bias": {NAME: 1}},
    "salt": {"prompt": WORDS, "cache_salt": WORDS},
    "user": {"prompt": WORDS, "user": WORDS, "top_p": 7},
    "ids": {"prompt": [10**9], "user": WORDS},
    "mixed prompt": {"prompt": [WORDS, 1]},
    "surrogate": {"prompt": WORDS + "\ud800"},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_a_refused_body_is_not_repeated(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    body = BODIES[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    for extra in ({}, {"stream": True}):
        content = json.dumps({**body, **extra}).encode()
        headers = {"content-type": "application/json", **bearer(ACME)}
        reply = await rigs.http.client.post(path, content=content, headers=headers)
        assert 400 <= reply.status_code < 500, reply.text
        check(rigs, capsys, caplog, reply.text)


CONSTRAINTS: Mapping[str, Any] = {
    "pattern": {"prompt": WORDS, "guided_regex": f"{WORDS}["},
    "schema": {"prompt": WORDS, "guided_json": {"type": WORDS}},
    "grammar": {"prompt": WORDS, "guided_grammar": WORDS},
    "reference": {"prompt": WORDS, "guided_json": {"$ref": f"#/{WORDS}"}},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_a_refused_constraint_is_repeated_to_its_client_alone(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The client hears which part of it is wrong; logs and metrics have nothing of it."""
    reply = await rigs.http.client.post("/v1/completions", json=CONSTRAINTS[name], headers=bearer(ACME))
    assert reply.status_code == 400, reply.text
    check(rigs, capsys, caplog, "")


RAW: Mapping[str, bytes] = {
    "no JSON": f'{{"prompt": "{WORDS}'.encode(),
    "not UTF-8": b'{"prompt": "' + WORDS.encode() + b'\xff"}',
    "NaN": f'{{"prompt": "{WORDS}", "temperature": NaN}}'.encode(),
    "deep": b"[" * 100_000 + WORDS.encode(),
    "large": b'{"prompt": "' + WORDS.encode() * 200_000 + b'"}',
    "an array": f'["{WORDS}"]'.encode(),
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_broken_body_is_not_repeated(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, path: str, name: str
) -> None:
    headers = {"content-type": "application/json", **bearer(ACME)}
    reply = await rigs.http.client.post(path, content=RAW[name], headers=headers)
    assert 400 <= reply.status_code < 500
    check(rigs, capsys, caplog, reply.text)


@pytest.mark.parametrize(
    "raw",
    [f"GET /{WORDS} HTTP/1.1\r\nHost: {WORDS}\r\nX: {WORDS}\r\nX : y\r\n\r\n", f"{WORDS}\r\n\r\n",
     f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {WORDS}\r\n\r\n",
     f"GET /v1/models HTTP/1.1\r\nAuthorization: {WORDS}\r\n\r\n",
     f"GET /admin/v1/state HTTP/1.1\r\nX-Admin-Key: {WORDS}\r\n\r\n",
     f"GET /live?{WORDS} HTTP/1.1\r\nX: {WORDS * 2000}\r\n\r\n"],
)  # fmt: skip
async def test_a_broken_or_refused_head_is_not_repeated(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, raw: str
) -> None:
    status, body = await exchange(rigs.http.port, raw.encode())
    assert 400 <= status < 500
    check(rigs, capsys, caplog, body.decode())


SERVICES = {
    "refused": lambda: failing(Overloaded("the queue is full", retry_after_s=1.0)),
    "lost": lambda: failing(WorkerFailed("prefill-0 was lost")),
    "lost in mid-stream": lambda: failing(
        WorkerFailed("decode-0 was lost"), lambda request: [accepted(request), *tokens([ids("ok")], None)]
    ),
    "a bug": lambda: ScriptedService(breaking),
    "a bug in mid-stream": lambda: ScriptedService(lambda request: list(breaking_late(request))),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SERVICES)
async def test_what_fails_behind_the_front_end_tells_nothing(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str, stream: bool
) -> None:
    rigs.says(SERVICES[name]())
    reply = await rigs.http.client.post(
        "/v1/completions", json={"prompt": WORDS, "stream": stream}, headers=bearer(ACME)
    )
    assert '"error"' in reply.text
    check(rigs, capsys, caplog, reply.text)
    request = pb.GenerateRequest(prompt=WORDS, stream=stream)
    check(rigs, capsys, caplog, await refusal(rigs, request))


REQUESTS: Mapping[str, pb.GenerateRequest] = {
    "wrong value": pb.GenerateRequest(prompt=WORDS, sampling=pb.SamplingParams(temperature=-1)),
    "unsupported": pb.GenerateRequest(prompt=WORDS, sampling=pb.SamplingParams(use_beam_search=True), session_id=WORDS),
    "bad words": pb.GenerateRequest(prompt=WORDS, sampling=pb.SamplingParams(bad_words=[WORDS] * 65)),
    "session": pb.GenerateRequest(prompt=WORDS, session_id=WORDS),
    "too long": pb.GenerateRequest(prompt=WORDS * 100),
    "too large": pb.GenerateRequest(prompt=WORDS * 120_000),
    "no such model": pb.GenerateRequest(prompt=WORDS, model=NAME),
    "stop": pb.GenerateRequest(prompt=WORDS, stop=pb.StopConditions(stop=[WORDS] * 9)),
    "salt": pb.GenerateRequest(prompt=WORDS, cache_salt=WORDS),
    "role": pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role=WORDS, content=WORDS)])),
    "template arguments": pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=WORDS)], chat_template_kwargs_json=WORDS)
    ),
    "request id": pb.GenerateRequest(prompt=WORDS, request_id=WORDS * 50),
    "worker": pb.GenerateRequest(prompt=WORDS, routing=pb.RoutingHints(prefill_worker_id=WORDS * 50)),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_refused_message_is_not_repeated(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    check(rigs, capsys, caplog, await refusal(rigs, REQUESTS[name]))


async def test_a_wrong_key_is_not_repeated(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check(rigs, capsys, caplog, await refusal(rigs, pb.GenerateRequest(prompt=WORDS), key=WORDS))


async def test_the_check_would_see_words_in_a_log(
    rigs: Rigs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from common.telemetry.logs import get_logger

    get_logger().info("request_refused", reason=WORDS)
    with pytest.raises(AssertionError):
        check(rigs, capsys, caplog, "")


async def refusal(rigs: Rigs, request: pb.GenerateRequest, key: str = ACME) -> str:
    """Everything that the client of a failing call gets to see."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rigs.rpc.generate(request, metadata=(("authorization", f"Bearer {key}"),))
    error = caught.value
    assert error.code() not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    parts = (error.details(), error.initial_metadata(), error.trailing_metadata(), details_of(error))
    return " ".join(map(str, parts))
