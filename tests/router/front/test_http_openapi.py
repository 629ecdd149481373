"""`/openapi.json` says what is there and what is accepted; a fuzzer that goes by it finds nothing unexpected."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, seed, settings

from router.front.http.openapi import description
from router.front.openai.fields import NEUTRAL, NotOffered, fields_of
from router.front.openai.requests import ChatBody
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.scripted_service import always

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = [{"role": "user", "content": "x"}]
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method"),
)
# Of an environment that was installed before they were needed.
schemathesis = pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


async def document_of(rig: HttpRig) -> dict[str, Any]:
    document: dict[str, Any] = (await rig.client.get("/openapi.json")).json()
    return document


@pytest.mark.timeout(600)
async def test_a_fuzzer_finds_nothing_unexpected(rig: HttpRig) -> None:
    """Valid and invalid requests for every operation; the fuzzer is synchronous, hence the thread."""
    schema = schemathesis.openapi.from_dict(await document_of(rig))
    await asyncio.to_thread(_fuzz, schema, rig.url)


def _fuzz(schema: Any, url: str) -> None:
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:  # no path is invalid
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            _try(operation.as_strategy(generation_mode=mode), url)


def _try(strategy: Any, url: str) -> None:
    @seed(1)
    @settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def run(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=[getattr(schemathesis.checks, name) for name in CHECKS], timeout=60)

    run()


async def test_every_path_of_the_api_is_described_with_its_methods(rig: HttpRig) -> None:
    paths = (await document_of(rig))["paths"]
    for path, methods in paths.items():
        for method in ("get", "post"):
            reply = await rig.client.request(method, path.replace("{model}", "tiny"), json={})
            assert (reply.status_code == 405) == (method not in methods), (method, path)


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ({"messages": USER, "temperature": 2.0, "stop": ["x"], "logit_bias": {"5": -1.5}, "seed": -1}, True),
        ({"messages": USER, "temperature": 2.1}, False),
        ({"messages": USER, "top_p": 0}, False),
        ({"messages": USER, "n": 9}, False),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, False),
        ({"messages": USER, "max_completion_tokens": 0}, False),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}, True),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, False),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, True),
        ({"messages": USER, "tools": [{"type": "function", "function": {"nam": "f"}}]}, False),
        ({"messages": USER, "tool_choice": "any"}, False),
        ({"messages": USER, "temprature": 1}, False),
        ({"messages": USER, "metadata": {"any": ["thing"]}, "prompt_cache_key": 7}, True),
        ({"messages": USER, "response_format": {"type": "json_object"}}, True),
        ({"messages": USER, "response_format": {"type": "text"}}, True),
        ({}, False),
        *[({"messages": USER, name: value}, True) for name in NEUTRAL for value in NEUTRAL[name]
          if name in fields_of(ChatBody, NotOffered)],
    ],
)  # fmt: skip
async def test_what_the_description_says_of_a_body_is_what_happens(
    rig: HttpRig, body: dict[str, Any], is_right: bool
) -> None:
    document = await document_of(rig)
    schema = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    assert jsonschema_rs.validator_for(schema).is_valid(body) == is_right
    assert (await rig.post("/v1/chat/completions", body)).status_code == (200 if is_right else 400)


async def test_the_page_for_people_names_every_operation_and_loads_nothing(rig: HttpRig) -> None:
    reply = await rig.client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    for path in description("1")["paths"]:
        assert f"{path}</code>" in reply.text
    for word in ("bad_words", "from 0, to 2", "Not offered.", "Accepted, without effect."):
        assert word in reply.text
    assert not {"<script", "src=", "<link"} & set(reply.text.split())
    assert "<script" not in reply.text
