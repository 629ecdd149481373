"""The bytes of streamed events: known ones, and that the short way writes what the long way does."""

import random
from dataclasses import replace
from typing import Any

import pytest

from common.values.request import FinishReason
from router.front.http import generation, stream
from router.front.http.stream import PlainFrames, is_plain, sse_frame
from router.request.dialect import Dialect
from router.text.choice_text import ChoiceDelta
from tests.router.front.http_rig import MODEL, http_rig, ids
from tests.router.front.scripted_service import always

TEXTS = [
    "plain words",
    'quotes " and \\ and \n',
    "data: [DONE]\n\n",
    "Héllo 😀",
    "a\u2028b\u2029c\u0085d",
    "{}[]",
    "\x00\x1f",
    '<think>"Hm"\u2028</think>Yes.',
]
CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}
GOLDEN = (
    b'data: {"id":"cmpl-id","object":"text_completion","created":7,"model":"tiny","choices":[{"index":0,"text":"a",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}],"system_fingerprint":null}\n\n'
    b'data: {"id":"cmpl-id","object":"text_completion","created":7,"model":"tiny","choices":[{"index":0,"text":"b",'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null}],"system_fingerprint":null}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.fixture(autouse=True)
def one_id_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation.secrets, "token_hex", lambda _: "id")
    monkeypatch.setattr(generation.time, "time", lambda: 7)


async def streamed(text: str, path: str, body: dict[str, Any]) -> bytes:
    model = replace(MODEL, dialect=Dialect(reasoning="think"))
    async with http_rig(always(ids(text), FinishReason.LENGTH), model=model) as rig:
        reply = await rig.client.post(path, json={"model": "tiny", "stream": True, "max_tokens": 64, **body})
        assert reply.status_code == 200, reply.text
        return reply.content


async def test_a_streamed_completion_is_these_bytes() -> None:
    assert await streamed("ab", "/v1/completions", COMPLETION) == GOLDEN


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_plain_events_have_the_bytes_of_ordinary_ones(
    monkeypatch: pytest.MonkeyPatch, text: str, path: str, body: dict[str, Any]
) -> None:
    options: list[dict[str, Any]] = [{}, {"stream_options": {"include_usage": True}}, {"n": 2}]
    if path.endswith("chat/completions"):
        options.append({"include_reasoning": False})
    short = [await streamed(text, path, body | option) for option in options]
    monkeypatch.setattr(stream, "is_plain", lambda delta: False)
    assert short == [await streamed(text, path, body | option) for option in options]
    assert all(b"data: [DONE]" in each for each in short)


def test_each_choice_is_rendered_once_for_each_kind_of_text_and_any_text_stands_in_it() -> None:
    asked: list[int] = []

    def frame_of(index: int, delta: ChoiceDelta) -> bytes:
        return sse_frame({"index": index, "text": delta.text, "thought": [delta.reasoning] * 2})

    def render(index: int, delta: ChoiceDelta) -> bytes:
        asked.append(index)
        return frame_of(index, delta)

    frames, rng = PlainFrames(render), random.Random(3)
    for number in range(200):
        text = "".join(chr(rng.choice([*range(0xD800), *range(0xE000, 0x11000)])) for _ in range(5))
        index = number % 2
        for delta in (ChoiceDelta(index, (), text), ChoiceDelta(index, (), "", reasoning=text)):
            assert is_plain(delta)
            assert frames.frame(index, delta) == frame_of(index, delta)
    assert asked == [0, 0, 1, 1]
