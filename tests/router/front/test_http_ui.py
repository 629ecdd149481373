"""The page's files, the stream of snapshots, and who may administer."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from router.front.http.events import MAX_WATCHERS, brief
from router.front.http.ui import FOLDER
from tests.router.front.http_rig import HttpRig, http_rig, ids, open_access
from tests.router.front.scripted_service import always
from tests.ui.page_service import record

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "s3cret-key"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok")), access=open_access(KEY)) as rig:
        yield rig


async def first_snapshot(rig: HttpRig) -> dict[str, object]:
    async with rig.client.stream("GET", "/admin/v1/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            snapshot: dict[str, object] = json.loads(line.removeprefix("data: "))
            return snapshot
    raise AssertionError("no event came")


async def test_the_page_forbids_everything_but_itself(rig: HttpRig) -> None:
    reply = await rig.client.get("/ui/")
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert (reply.headers["x-content-type-options"], policy["frame-ancestors"]) == ("nosniff", "'none'")


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
async def test_every_file_is_served_and_names_no_other_host(rig: HttpRig, name: str) -> None:
    reply = await rig.client.get(f"/ui/{name}")
    assert reply.content == (FOLDER / name).read_bytes()
    assert "http:" not in (text := reply.text.replace("http://www.w3.org/2000/svg", ""))
    assert "https:" not in text
    again = await rig.client.get(f"/ui/{name}", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e/app.py", "__init__.py", "ui/index.html"])
async def test_other_files_are_not_found(rig: HttpRig, name: str) -> None:
    reply = await rig.client.get(f"/ui/{name}")
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_short_address_leads_to_the_page_below_any_prefix(rig: HttpRig) -> None:
    reply = await rig.client.get("/ui")
    assert (reply.status_code, reply.headers["location"]) == (307, "ui/")


async def test_a_snapshot_says_state_last_minute_and_requests(rig: HttpRig) -> None:
    answer = (await rig.post("/v1/completions", {"prompt": "x"})).json()
    snapshot = await first_snapshot(rig)
    assert snapshot["router"] == {
        "router_id": "router-a", "version": "0.1.0", "model": "tiny", "max_model_len": 512,
        "is_ready": True, "reasons": [],
    }  # fmt: skip
    assert [request["request_id"] for request in snapshot["requests"]] == [answer["id"]]  # type: ignore[attr-defined]
    assert snapshot["recent"]["ttft_p50_s"] == 0.0421  # type: ignore[index]
    assert snapshot["recent"]["transfers"][0]["bytes_per_s"] == 48.2e6  # type: ignore[index]
    assert snapshot["pools"] == {"decode": {"desired": 2}}
    assert len(snapshot["state"]["workers"]) == 2  # type: ignore[index]


async def test_watchers_are_bounded_and_their_places_come_back(rig: HttpRig) -> None:
    async with httpx.AsyncClient(base_url=rig.url, limits=httpx.Limits(max_connections=None), timeout=60) as client:
        streams = [
            await client.send(client.build_request("GET", "/admin/v1/events"), stream=True) for _ in range(MAX_WATCHERS)
        ]
        refused = await client.get("/admin/v1/events")
        for stream in streams:
            await stream.aclose()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert await first_snapshot(rig)


async def test_a_brief_names_the_workers_of_the_last_attempt() -> None:
    shown = brief(record("r"))
    assert (shown["prefill_worker"], shown["decode_worker"], shown["wall_s"]) == ("prefill-0", "decode-0", 1.0)
    assert brief({"request_id": "r"})["decode_worker"] == ""
    assert not {"decisions", "timings", "attempts"} & set(shown)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "state"), ("GET", "requests"), ("GET", "requests/x"), ("GET", "events"),
        ("POST", "pools/decode"), ("POST", "workers/decode-0/drain"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("headers", [{}, {"x-admin-key": KEY[:-1]}, {"authorization": "Bearer wrong"}])
async def test_administration_is_closed_without_the_key(
    guarded: HttpRig, method: str, path: str, headers: dict[str, str]
) -> None:
    reply = await guarded.client.request(method, f"/admin/v1/{path}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in reply.text
    assert guarded.scaled == []


@pytest.mark.parametrize("headers", [{"x-admin-key": KEY}, {"authorization": f"Bearer {KEY}"}])
async def test_the_key_opens_it(guarded: HttpRig, headers: dict[str, str]) -> None:
    assert (await guarded.client.get("/admin/v1/state", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/ui/", "/ready", "/metrics", "/v1/models"])
async def test_what_is_no_administration_needs_no_key(guarded: HttpRig, path: str) -> None:
    assert (await guarded.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 202), ("none", 202)]
)
async def test_pages_of_other_sites_change_nothing(rig: HttpRig, site: str, status: int) -> None:
    reply = await rig.client.post("/admin/v1/workers/decode-0/drain", headers={"sec-fetch-site": site})
    assert reply.status_code == status
