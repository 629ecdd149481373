"""API keys over HTTP: who gets in where, edge values, limits, and what other tenants can learn: nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from router.core.generation import Accepted
from tests.router.front.http_rig import HttpRig, http_rig, ids, in_flight
from tests.router.front.keys_for_tests import (
    ACME,
    ACME_OLD,
    ADMIN,
    MAX_NUM_QUEUED,
    OTHER,
    Clock,
    access,
    bearer,
    key_file,
)
from tests.router.front.raw_http import exchange
from tests.router.front.scripted_service import Pause, ScriptedService, accepted, always, answer

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = {"prompt": "x", "max_tokens": 4}
OF_TENANTS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
]  # fmt: skip
OF_ADMINISTRATORS = [
    ("GET", "/admin/v1/state"), ("GET", "/admin/v1/requests"), ("GET", "/admin/v1/requests/x"),
    ("GET", "/admin/v1/events"), ("POST", "/admin/v1/pools/decode"), ("POST", "/admin/v1/workers/decode-0/drain"),
    ("GET", "/metrics"), ("GET", "/load"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok")), access=access()) as rig:
        yield rig


def submitted(rig: HttpRig) -> list[Any]:
    service = rig.frontend.service
    assert isinstance(service, ScriptedService)
    return service.submitted


async def ask(rig: HttpRig, key: str, **body: object) -> httpx.Response:
    return await rig.client.post("/v1/completions", json={**BODY, **body}, headers=bearer(key))


@pytest.mark.parametrize("key", [ACME, ACME_OLD, OTHER], ids=["new", "old", "other"])
async def test_each_key_of_a_tenant_opens_both_apis_of_openai(rig: HttpRig, key: str) -> None:
    client = rig.openai.with_options(api_key=key)
    assert (await client.completions.create(model="tiny", prompt="x")).choices[0].text == "ok"


async def test_the_openai_client_sees_an_authentication_error(rig: HttpRig) -> None:
    client = rig.openai.with_options(api_key="pds-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(("method", "path"), OF_TENANTS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(ADMIN), {"x-admin-key": ADMIN}])
async def test_a_tenants_endpoint_is_closed_without_its_key(
    rig: HttpRig, method: str, path: str, headers: dict[str, str]
) -> None:
    reply = await rig.client.request(method, path, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), OF_ADMINISTRATORS)
@pytest.mark.parametrize("headers", [{}, bearer(ACME), {"x-admin-key": ACME}])
async def test_no_tenant_is_an_administrator(rig: HttpRig, method: str, path: str, headers: dict[str, str]) -> None:
    reply = await rig.client.request(method, path, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert rig.scaled == []


async def test_without_an_admin_key_administration_is_closed_to_everybody() -> None:
    async with http_rig(always(ids("ok")), access=access(admin_key="")) as rig:
        for headers in ({}, bearer("x"), bearer(ACME), {"x-admin-key": ""}):
            assert (await rig.client.get("/admin/v1/state", headers=headers)).status_code == 401
            assert (await rig.client.get("/metrics", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/live"])
async def test_probes_need_no_key_and_tell_no_details(path: str) -> None:
    async with http_rig(always(ids("ok")), access=access()) as rig:
        rig.frontend.in_flight.close()
        open_answer = await rig.client.get(path)
        assert set(open_answer.json()) == {"status"}
        if path != "/live":
            assert open_answer.status_code == 503
            assert (await rig.client.get(path, headers=bearer(ADMIN))).json()["reasons"]


@pytest.mark.parametrize(
    "path",
    ["//v1/completions", "/v1/../v1/completions", "/V1/completions", "/v1/completions/", "/v1/%2e/completions",
     "/%76%31/completions", "/v1/completions?x=/health", "/health/../v1/completions", "/docs", "/openapi.json",
     "/redoc", "/admin", "/admin/v1/", "/ui/../admin/v1/state", "/ui/%2e%2e/admin/v1/state", "/metrics/"],
)  # fmt: skip
async def test_no_spelling_of_a_path_gets_around_the_key(rig: HttpRig, path: str) -> None:
    before = len(submitted(rig))
    for host in ("evil", "127.0.0.1"):
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nX-Forwarded-For: 127.0.0.1\r\nX-Original-URL: /health\r\n"
        raw = f"{head}Content-Type: application/json\r\nContent-Length: 15\r\n\r\n" + '{"prompt": "x"}'
        status, _ = await exchange(rig.port, raw.encode())
        assert status in (400, 401, 404, 405), (path, host)
    assert len(submitted(rig)) == before


@pytest.mark.parametrize(
    "value",
    [b"Bearer ", b"Bearer", b"", b"bearer " + ACME.encode(), b"Basic x", b"Bearer " + ACME.encode() + b"x",
     b"Bearer " + ACME[:-1].encode(), "Bearer k\u00e9y".encode(), "Bearer k\u00e9y".encode("latin-1"),
     b"Bearer  " + ACME.encode(), ACME.encode(), b"Bearer " + ACME.encode() + b", Bearer x", b"Bearer \x80\xff"],
    ids=lambda value: value.replace(ACME.encode(), b"KEY").replace(ACME[:-1].encode(), b"KE").decode("latin-1"),
)  # fmt: skip
async def test_edge_values_of_a_key_are_refused_and_never_a_fault(rig: HttpRig, value: bytes) -> None:
    raw = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: " + value + b"\r\n\r\n"
    status, body = await exchange(rig.port, raw)
    assert status in (400, 401)
    assert ACME.encode() not in body


async def test_two_keys_at_once_are_refused(rig: HttpRig) -> None:
    line = f"Authorization: Bearer {ACME}\r\n".encode()
    for second in (line, b"Authorization: Bearer x\r\n"):
        status, _ = await exchange(rig.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + line + second + b"\r\n")
        assert status in (400, 401)


async def test_the_key_is_checked_before_the_body_is_read(rig: HttpRig) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    )
    status, body = await exchange(rig.port, head)  # and nothing more comes
    assert status == 401
    assert json.loads(body)["error"]["type"] == "authentication_error"


async def test_a_request_beyond_the_limit_is_told_when_to_come_back() -> None:
    clock = Clock()
    file = key_file(limits={"requests_per_minute": 2, "tokens_per_minute": 1000})
    async with http_rig(always(ids("ok")), access=access(file, clock)) as rig:
        first = await ask(rig, ACME)
        second = await ask(rig, ACME, max_tokens="no number")  # counts as well
        third = await ask(rig, ACME)
        assert [reply.status_code for reply in (first, second, third)] == [200, 400, 429]
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert third.headers["retry-after"] == "30"
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert third.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
        assert (await ask(rig, OTHER)).status_code == 200
        clock.now_s += 30
        assert (await ask(rig, ACME)).status_code == 200


async def test_streams_carry_what_is_left_too() -> None:
    async with http_rig(always(ids("ok")), access=access(key_file(limits={"requests_per_minute": 5}))) as rig:
        reply = await ask(rig, ACME, stream=True)
    assert reply.headers["x-ratelimit-remaining-requests"] == "4"


async def test_prompt_and_output_tokens_are_charged() -> None:
    clock = Clock()
    async with http_rig(always(ids("okok")), access=access(key_file(limits={"tokens_per_minute": 60}), clock)) as rig:
        assert (await ask(rig, ACME, prompt=[65] * 57)).status_code == 200
        refused = await ask(rig, ACME, prompt=[65] * 3)
        assert (refused.status_code, refused.headers["retry-after-ms"]) == (429, "4000")
        clock.now_s += 4
        assert (await ask(rig, ACME, prompt=[65] * 3)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_concurrent_requests_are_bounded_and_their_places_come_back(stream: bool) -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with http_rig(service, access=access(key_file(limits={"max_concurrent": 2}))) as rig:
        running = [asyncio.ensure_future(ask(rig, ACME)) for _ in range(2)]
        await in_flight(rig.frontend, 2)
        refused = await ask(rig, ACME, stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        others = asyncio.ensure_future(ask(rig, OTHER))
        await in_flight(rig.frontend, 3)
        for task in (*running, others):
            task.cancel()
        await in_flight(rig.frontend, 0)
        again = asyncio.ensure_future(ask(rig, ACME))
        await in_flight(rig.frontend, 1)
        again.cancel()
        await in_flight(rig.frontend, 0)


async def test_beyond_a_limit_no_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with http_rig(service, access=access(key_file(limits={"max_concurrent": 1}))) as rig:
        running = asyncio.ensure_future(ask(rig, ACME))
        await in_flight(rig.frontend, 1)
        monkeypatch.setattr(rig.frontend, "tokenize", lambda prompt: 1 // 0)
        assert (await ask(rig, ACME)).status_code == 429
        running.cancel()
        await in_flight(rig.frontend, 0)


@pytest.mark.parametrize("limits", [{"max_concurrent": 2}, {"queue_share": 0.25}])
async def test_more_prompts_than_may_ever_run_at_a_time_are_no_reason_to_wait(limits: dict[str, float]) -> None:
    service = always(ids("ok"))
    async with http_rig(service, access=access(key_file(limits=limits))) as rig:
        for num_prompts, status in ((2, 200), (3, 400)):
            body = {"prompt": ["x"] * num_prompts}
            reply = await rig.client.post("/v1/completions", json=body, headers=bearer(ACME))
            assert reply.status_code == status
        assert (reply.json()["error"]["param"], len(service.submitted)) == ("prompt", 2)
        assert "retry-after" not in reply.headers


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("limits", [{"max_concurrent": 2}, {"queue_share": 0.25}, {"tokens_per_minute": 60}])
async def test_of_several_prompts_none_is_begun_unless_all_are_admitted(limits: dict[str, float], stream: bool) -> None:
    service = ScriptedService(lambda request: [Pause()])
    async with http_rig(service, access=access(key_file(limits=limits))) as rig:
        running = asyncio.ensure_future(ask(rig, ACME, prompt=[65] * 20))
        await in_flight(rig.frontend, 1)
        refused = await ask(rig, ACME, prompt=[[65] * 30] * 2, stream=stream)
        assert (refused.status_code, len(service.submitted)) == (429, 1)
        assert refused.headers.get("x-ratelimit-remaining-tokens", "40") == "40"
        running.cancel()
        await in_flight(rig.frontend, 0)


async def test_a_tenant_fills_no_more_than_its_share_of_the_queue() -> None:
    are_placed = False
    service = ScriptedService(lambda request: [*([accepted(request)] if are_placed else []), Pause()])
    async with http_rig(service, access=access(key_file(limits={"queue_share": 0.25}))) as rig:
        share = MAX_NUM_QUEUED // 4
        tasks = [asyncio.ensure_future(ask(rig, ACME)) for _ in range(share)]
        await in_flight(rig.frontend, share)
        assert (await ask(rig, ACME)).status_code == 429
        tasks.append(asyncio.ensure_future(ask(rig, OTHER)))
        await in_flight(rig.frontend, share + 1)
        for task in tasks[:1]:
            task.cancel()
        await in_flight(rig.frontend, share)
        are_placed = True
        tasks.append(asyncio.ensure_future(ask(rig, ACME)))
        await in_flight(rig.frontend, share + 1)
        tasks.append(asyncio.ensure_future(ask(rig, ACME)))  # the one before waits no longer
        await in_flight(rig.frontend, share + 2)
        for task in tasks:
            task.cancel()
        await in_flight(rig.frontend, 0)


async def test_a_tenants_salt_is_the_servers_and_no_clients() -> None:
    async with http_rig(always(ids("ok")), access=access()) as rig:
        for key in (ACME, ACME_OLD, OTHER):
            assert (await ask(rig, key)).status_code == 200
        acme, acme_old, other = (request.cache_salt for request in submitted(rig))
        assert acme == acme_old != other
        assert len(acme) == 32
        for salt in ("acme", acme.hex(), "x"):
            refused = await ask(rig, OTHER, cache_salt=salt)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


async def test_a_tenant_that_may_divides_its_own_cache_and_never_reaches_anothers() -> None:
    async with http_rig(always(ids("ok")), access=access(key_file(may_salt=True))) as rig:
        for key, body in ((OTHER, {}), (ACME, {}), (ACME, {"cache_salt": "a"}), (ACME, {"cache_salt": "other"})):
            assert (await ask(rig, key, **body)).status_code == 200
        salts = [request.cache_salt for request in submitted(rig)]
    assert len(set(salts)) == 4


@pytest.mark.parametrize(("priority", "status"), [(0, 200), (5, 200), (-1, 400), (-999, 400)])
async def test_no_tenant_goes_before_the_others_unless_it_may(rig: HttpRig, priority: int, status: int) -> None:
    assert (await ask(rig, ACME, priority=priority)).status_code == status


async def test_a_withdrawn_key_ends_nothing_that_runs() -> None:
    release = asyncio.Event()

    class Waiting(ScriptedService):
        async def submit(self, request: Any) -> AsyncIterator[Any]:
            self.submitted.append(request)
            for event in answer(request, ids("ok")):
                yield event
                if isinstance(event, Accepted):
                    await release.wait()

    gate = access()
    async with http_rig(Waiting(lambda _: []), access=gate) as rig:
        running = asyncio.ensure_future(ask(rig, ACME_OLD))
        await in_flight(rig.frontend, 1)
        without = key_file().model_dump()
        without["tenants"]["acme"]["keys"] = without["tenants"]["acme"]["keys"][:1]
        gate.tenants.update(type(key_file()).model_validate(without))
        assert (await ask(rig, ACME_OLD)).status_code == 401
        release.set()
        assert (await running).status_code == 200
        assert (await ask(rig, ACME)).status_code == 200
