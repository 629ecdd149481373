"""Guided decoding over both APIs: each way to state a constraint reaches the workers, or is refused with its reason."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.guided import grammar
from common.values.request import FinishReason
from common.wire.pb import generation_pb2 as pb
from tests.router.front.grpc_rig import grpc_rig
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.scripted_service import ScriptedService, always
from tests.router.text.tokenizers_for_tests import EOS_ID

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_SCHEMA = grammar.of_json_schema(SCHEMA)
MESSAGES = [{"role": "user", "content": "x"}]


def service() -> ScriptedService:
    return always([*ids('{"a": 1}'), EOS_ID], FinishReason.STOP)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(service()) as rig:
        yield rig


def grammars(rig: HttpRig) -> list[str]:
    submitted = rig.frontend.service.submitted  # type: ignore[attr-defined]
    return [request.sampling.grammar for request in submitted]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OF_SCHEMA),
        ({"response_format": {"type": "json_object"}}, grammar.of_json_object()),
        ({"response_format": {"type": "text"}}, ""),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, grammar.of_json_object()),
        ({"structured_outputs": {"regex": "[ab]+"}}, grammar.of_regex("[ab]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, grammar.of_choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, grammar.of_grammar('start: "a"')),
        ({"guided_json": '{"type": "integer"}'}, grammar.of_json_schema({"type": "integer"})),
        ({"guided_regex": "[ab]+"}, grammar.of_regex("[ab]+")),
        ({"guided_choice": ["a", "b"]}, grammar.of_choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, grammar.of_grammar('root ::= "a"')),
    ],
)  # fmt: skip
async def test_every_way_to_state_a_constraint(rig: HttpRig, stated: dict[str, Any], expected: str) -> None:
    for path, prompt in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        reply = await rig.post(path, {**prompt, **stated})
        assert reply.status_code == 200, reply.text
    assert grammars(rig) == [expected, expected]


async def test_structural_tags(rig: HttpRig) -> None:
    structure = {"begin": "<f=a>", "end": "</f>", "schema": SCHEMA}
    stated = {"type": "structural_tag", "structures": [structure], "triggers": ["<f"]}
    reply = await rig.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": stated})
    assert reply.status_code == 200, reply.text
    assert grammars(rig) == [grammar.of_structural_tags([{**structure, "trigger": "<f"}])]
    stated["triggers"] = ["<x"]
    refused = await rig.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": stated})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.triggers")


@pytest.mark.parametrize(
    ("stated", "param", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "needs a schema"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_regex": "["}, "guided_regex", "regex"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one way only"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "constrained"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regex"),
    ],
)  # fmt: skip
async def test_a_constraint_that_cannot_be_used_is_a_400_that_says_why(
    rig: HttpRig, stated: dict[str, Any], param: str, word: str
) -> None:
    reply = await rig.post("/v1/completions", {"prompt": "x", **stated})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert word in error["message"]
    assert grammars(rig) == []


async def test_a_constraint_is_compiled_once(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    check = grammar.check
    monkeypatch.setattr(grammar, "check", lambda text, tokenizer: compiled.append(text) or check(text, tokenizer))
    for _ in range(3):
        await rig.post("/v1/completions", {"prompt": "x", "guided_json": SCHEMA})
        await rig.post("/v1/completions", {"prompt": "x", "guided_regex": "a+"})
    assert compiled == [OF_SCHEMA, grammar.of_regex("a+")]


async def test_the_openai_client_parses_an_answer_of_a_schema(rig: HttpRig) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    parsed = await rig.openai.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(a=1)
    assert grammars(rig) != [""]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (pb.SamplingParams(json_schema='{"type": "integer"}'), grammar.of_json_schema({"type": "integer"})),
        (pb.SamplingParams(regex="[ab]+"), grammar.of_regex("[ab]+")),
        (pb.SamplingParams(grammar='start: "a"'), grammar.of_grammar('start: "a"')),
        (pb.SamplingParams(choice=pb.Choices(values=["a", "b"])), grammar.of_choice(["a", "b"])),
    ],
    ids=["json_schema", "regex", "grammar", "choice"],
)
async def test_every_constraint_of_grpc(sampling: pb.SamplingParams, expected: str) -> None:
    scripted = service()
    async with grpc_rig(scripted) as rig:
        async for _ in rig.stub.Generate(pb.GenerateRequest(prompt="x", sampling=sampling)):
            pass
    assert [request.sampling.grammar for request in scripted.submitted] == [expected]


async def test_a_wrong_constraint_of_grpc_is_an_invalid_argument_that_names_it() -> None:
    async with grpc_rig(service()) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.stub.Generate(pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(regex="["))):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.regex" in (caught.value.details() or "")
