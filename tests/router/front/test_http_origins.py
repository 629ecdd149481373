"""Pages of other sites: closed by default; those that are allowed may call the API, preflights, streams and errors."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from pydantic import ValidationError

from common.values.config import RouterSettings
from common.values.errors import WorkerFailed
from tests.router.front.http_rig import SETTINGS, HttpRig, http_rig, ids
from tests.router.front.keys_for_tests import access
from tests.router.front.scripted_service import accepted, always, failing, tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")
SITE = "https://app.example"
PREFLIGHT = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-request-id",
}
ALLOWED = "access-control-allow-origin"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    settings = replace(SETTINGS, allowed_origins=(SITE, "http://localhost:3000"))
    async with http_rig(always(ids("ok")), settings, access=access()) as rig:
        yield rig


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"])
async def test_a_preflight_needs_no_key_and_says_what_is_allowed(rig: HttpRig, path: str) -> None:
    reply = await rig.client.options(path, headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers[ALLOWED] == SITE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"]


async def test_a_site_that_is_not_allowed_gets_no_leave(rig: HttpRig) -> None:
    other = "https://evil.example"
    preflight = await rig.client.options("/v1/completions", headers={**PREFLIGHT, "origin": other})
    plain = await rig.client.get("/health", headers={"origin": other})
    assert preflight.status_code == 400
    assert ALLOWED not in preflight.headers
    assert ALLOWED not in plain.headers


async def test_errors_can_be_read_by_the_page(rig: HttpRig) -> None:
    no_key = await rig.client.post("/v1/completions", json={"prompt": "x"}, headers={"origin": SITE})
    not_found = await rig.client.get("/v1/nothing", headers={"origin": SITE})
    assert (no_key.status_code, not_found.status_code) == (401, 404)
    for reply in (no_key, not_found):
        assert reply.headers[ALLOWED] == SITE
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()


async def test_streams_and_whole_answers_and_late_errors_can_be_read_by_the_page() -> None:
    settings = replace(SETTINGS, allowed_origins=("*",))
    error = WorkerFailed("decode-0 was lost")
    late = failing(error, lambda request: [accepted(request), *tokens([ids("abc")], None)])
    for service in (always(ids("ok")), late):
        async with http_rig(service, settings) as rig:
            for stream in (True, False):
                body = {"prompt": "x", "stream": stream}
                reply = await rig.client.post("/v1/completions", json=body, headers={"origin": SITE})
                assert reply.headers[ALLOWED] == "*"


@pytest.mark.parametrize("path", ["/admin/v1/state", "/admin/v1/workers/w/drain", "/ui/"])
async def test_the_administration_is_never_open_to_another_site(rig: HttpRig, path: str) -> None:
    preflight = await rig.client.options(path, headers=PREFLIGHT)
    plain = await rig.client.get(path, headers={"origin": SITE})
    assert preflight.status_code != 200
    assert ALLOWED not in preflight.headers
    assert ALLOWED not in plain.headers


async def test_without_the_setting_no_site_is_allowed() -> None:
    async with http_rig(always(ids("ok"))) as rig:
        preflight = await rig.client.options("/v1/completions", headers=PREFLIGHT)
        plain = await rig.client.post("/v1/completions", json={"prompt": "x"}, headers={"origin": SITE})
    assert preflight.status_code == 405
    assert ALLOWED not in preflight.headers
    assert ALLOWED not in plain.headers


async def test_an_origin_is_a_scheme_and_a_host() -> None:
    assert RouterSettings(allowed_origins=("*", SITE, "http://localhost:3000")).allowed_origins[1] == SITE
    assert RouterSettings(allowed_origins=f"{SITE}, *").allowed_origins == (SITE, "*")  # type: ignore[arg-type]
    for wrong in ("app.example", "https://app.example/", "https://*.example", " ", "ftp://x"):
        with pytest.raises(ValidationError):
            RouterSettings(allowed_origins=(wrong,))
