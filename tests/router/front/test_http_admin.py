"""Probes, model, tokenize and administration over HTTP."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from router.front.frontend import Frontend
from router.front.service_protocol import Readiness
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.scripted_service import ScriptedService, always
from tests.router.text.tokenizers_for_tests import BOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


def service_of(frontend: Frontend) -> ScriptedService:
    assert isinstance(frontend.service, ScriptedService)
    return frontend.service


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_readiness_is_the_services(rig: HttpRig, path: str) -> None:
    assert (await rig.client.get(path)).status_code == 200
    service = service_of(rig.frontend)
    service.ready = Readiness(is_ready=False, reasons=("no decode worker is ready",))
    refused = await rig.client.get(path)
    service.ready = Readiness(is_ready=True)
    assert refused.status_code == 503
    assert refused.json() == {"status": "not ready", "reasons": ["no decode worker is ready"]}


async def test_liveness_version_load_and_metrics(rig: HttpRig) -> None:
    assert (await rig.client.get("/live")).json() == {"status": "alive"}
    assert (await rig.client.get("/version")).json() == {"version": "0.1.0"}
    assert (await rig.client.get("/load")).json() == {"server_load": 0}
    metrics = await rig.client.get("/metrics")
    assert metrics.text == "pdserve_requests_running 0\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_tokenize_and_detokenize(rig: HttpRig) -> None:
    text = (await rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
    plain = (await rig.post("/tokenize", {"prompt": "hé", "add_special_tokens": False})).json()
    chat = (await rig.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
    back = (await rig.post("/detokenize", {"tokens": text["tokens"]})).json()
    assert text["tokens"] == [BOS_ID, *ids("hé")]
    assert text["token_strs"] == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9"]
    assert (text["count"], text["max_model_len"]) == (4, 512)
    assert plain["tokens"] == ids("hé") and plain["token_strs"] is None
    assert chat["tokens"].count(BOS_ID) == 1
    assert back == {"prompt": "<s>hé"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/admin/v1/pools/decode", {"replicas": -1}, "replicas"),
        ("/admin/v1/pools/decode", {"replicas": "2"}, "replicas"),
        ("/admin/v1/pools/other", {"replicas": 1}, "role"),
        ("/admin/v1/pools", {"prefill": 1, "decode": 1025}, "decode"),
        ("/admin/v1/pools", {"prefill": -1}, "prefill"),
        ("/admin/v1/pools", {}, "prefill"),
        ("/admin/v1/workers/decode-0/drain", {"grace_s": -1}, "grace_s"),
    ],
)
async def test_bad_arguments_are_named(rig: HttpRig, path: str, body: dict[str, object], param: str) -> None:
    reply = await rig.post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_state_lists_workers_with_their_blocks(rig: HttpRig) -> None:
    state = (await rig.client.get("/admin/v1/state")).json()
    prefill, decode = state["workers"]
    assert (prefill["role"], decode["role"], decode["state"], state["num_queued"]) == ("prefill", "decode", "ready", 2)
    assert state["pools"] == {"decode": {"desired": 2}}
    counted = sum(decode[f"kv_blocks_{state}"] for state in ("used", "cached", "free", "held"))
    assert counted == decode["kv_blocks_total"]
    assert {
        "worker_id",
        "pid",
        "address",
        "running",
        "waiting",
        "waiting_uncached_tokens",
        "block_size",
        "step_s",
    } <= set(decode)


async def test_a_request_can_be_looked_up_by_its_answers_id(rig: HttpRig) -> None:
    answer = (await rig.post("/v1/completions", {"prompt": "x"})).json()
    record = (await rig.client.get(f"/admin/v1/requests/{answer['id']}")).json()
    listed = (await rig.client.get("/admin/v1/requests")).json()["requests"]
    missing = await rig.client.get("/admin/v1/requests/unknown")
    assert record["request_id"] == answer["id"] == listed[0]["request_id"]
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


async def test_the_clients_trace_goes_with_the_request(rig: HttpRig) -> None:
    trace_parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await rig.client.post("/v1/completions", json={"prompt": ["x", "y"]}, headers={"traceparent": trace_parent})
    await rig.client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": "long" * 1000})
    last = service_of(rig.frontend).submitted[-3:]
    assert [request.trace_parent for request in last] == [trace_parent, trace_parent, ("long" * 32)]


async def _chunks() -> AsyncIterator[bytes]:
    yield b'{"grace_s": 4}'


async def test_workers_are_drained_and_pools_scaled(rig: HttpRig) -> None:
    drained = await rig.client.post("/admin/v1/workers/decode-0/drain")
    with_grace = await rig.post("/admin/v1/workers/prefill-0/drain", {"grace_s": 2})
    unknown = await rig.client.post("/admin/v1/workers/nobody/drain")
    scaled = await rig.post("/admin/v1/pools/decode", {"replicas": 3})
    assert (drained.status_code, with_grace.status_code, scaled.status_code) == (202, 202, 202)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "worker_not_found")
    headers = {"content-type": "application/json"}
    in_chunks = await rig.client.post("/admin/v1/workers/prefill-0/drain", content=_chunks(), headers=headers)
    assert in_chunks.status_code == 202
    known = [call for call in service_of(rig.frontend).drained if call[0] != "nobody"]
    assert known == [("decode-0", 30.0), ("prefill-0", 2.0), ("prefill-0", 4.0)]
    both = await rig.post("/admin/v1/pools", {"prefill": 1, "decode": 3})
    one = await rig.post("/admin/v1/pools", {"prefill": 2})
    assert (both.status_code, both.json()) == (202, {"prefill": 1, "decode": 3})
    assert one.json() == {"prefill": 2}
    assert rig.scaled == [{"decode": 3}, {"prefill": 1, "decode": 3}, {"prefill": 2}]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/docs", 405),
        ("GET", "/redoc", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "//v1/completions", 404),
        ("POST", "/V1/completions", 404),
    ],
)
async def test_what_is_not_offered_is_refused_in_the_same_form(
    rig: HttpRig, method: str, path: str, status: int
) -> None:
    reply = await rig.client.request(method, f"{rig.url}{path}")
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


async def test_a_request_id_that_is_no_header_value_is_replaced(rig: HttpRig) -> None:
    echoed = await rig.client.get("/nothing", headers={"x-request-id": "abc-1"})
    replaced = await rig.client.get("/nothing", headers={"x-request-id": "a b" * 100})
    assert echoed.headers["x-request-id"] == "abc-1"
    assert replaced.headers["x-request-id"].startswith("req-")
