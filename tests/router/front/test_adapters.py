"""LoRA adapters as models of the API: named, listed, loaded, unloaded, refused; what the service is asked for."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoint import CheckpointError, ModelSpec, open_checkpoint
from common.cluster.adapters import AdapterRecord, AdapterRecords, AdapterStore
from common.cluster.redis import connect
from common.values.config import RouterSettings
from common.values.errors import InvalidRequest, PdserveError
from common.values.request import NO_ADAPTER
from router.request import limits
from router.request.adapters import ServedAdapters
from router.shared_adapters import SharedAdapters
from tests.redis_box import binaries, redis_box
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.scripted_service import always
from tests.router.front.test_http_admin import service_of
from tests.tiny_adapter import TinyAdapter, write_adapter
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return open_checkpoint(write_tiny_model(tmp_path_factory.getbasetemp() / "tiny")).config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, tmp_path_factory.getbasetemp() / "tiny", TinyAdapter(seed=seed))
    return folder


@pytest.fixture
async def rig(spec: ModelSpec, folder: Path) -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        rig.frontend.validator.adapters = ServedAdapters.of([f"a={folder / 'a'}"], spec, "tiny")
        yield rig


async def test_an_adapters_name_is_a_model_and_goes_with_the_request(rig: HttpRig) -> None:
    answer = (await rig.post("/v1/completions", {"model": "a", "prompt": "x"})).json()
    chat = await rig.post("/v1/chat/completions", {"model": "a", "messages": [{"role": "user", "content": "x"}]})
    plain = (await rig.post("/v1/completions", {"model": "tiny", "prompt": "x"})).json()
    assert (answer["model"], chat.json()["model"], plain["model"]) == ("a", "a", "tiny")
    first, second, third = service_of(rig.frontend).submitted[-3:]
    served = rig.frontend.validator.adapters.get("a")
    assert served is not None
    assert (first.adapter, first.adapter_name, second.adapter) == (served.adapter, "a", served.adapter)
    assert (third.adapter, third.adapter_name) == (NO_ADAPTER, "")


async def test_adapters_are_listed_beneath_the_model(rig: HttpRig) -> None:
    models = (await rig.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("tiny", None), ("a", "tiny")]
    assert (await rig.client.get("/v1/models/a")).json() == models[1]


async def test_a_wrong_name_is_not_found_and_the_right_ones_are_listed(rig: HttpRig) -> None:
    reply = await rig.post("/v1/completions", {"model": "c", "prompt": "x"})
    assert reply.status_code == 404
    assert "'tiny', 'a' are" in reply.json()["error"]["message"]


async def test_the_admin_api_is_off_where_nothing_shares_adapters(rig: HttpRig, folder: Path) -> None:
    reply = await rig.post("/admin/v1/adapters", {"name": "b", "path": str(folder / "b")})
    gone = await rig.client.delete("/admin/v1/adapters/tiny")
    listed = (await rig.client.get("/admin/v1/adapters")).json()["adapters"]
    assert (reply.status_code, gone.status_code) == (400, 400)
    assert [each["name"] for each in listed] == ["a"]


@pytest.mark.parametrize("name", ["", "tiny", "x\n"])
def test_names_that_cannot_be_told_apart_are_refused(spec: ModelSpec, folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        ServedAdapters(spec, "tiny").read(name, str(folder / "a"))


@pytest.mark.parametrize("path", ["/\0", "~nobody-of-that-name/x", "/" + "x" * 5000, "", "/dev/null", "\ud800"])
def test_what_is_no_path_of_an_adapter_is_refused(spec: ModelSpec, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ServedAdapters(spec, "tiny").read("a", path)
    assert caught.value.param == "path"


def test_another_adapter_cannot_take_a_name_and_their_number_is_bounded(
    spec: ModelSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = ServedAdapters.of([f"a={folder / 'a'}"], spec, "tiny")
    adapters.add(adapters.read("a", str(folder / "a")))
    with pytest.raises(InvalidRequest, match="unload it first"):
        adapters.add(adapters.read("a", str(folder / "b")))
    with pytest.raises(InvalidRequest, match=r"router\.lora"):
        adapters.remove("a")
    monkeypatch.setattr(limits, "MAX_ADAPTERS", 1)
    with pytest.raises(InvalidRequest, match="the most"):
        adapters.add(adapters.read("b", str(folder / "b")))


def test_a_configured_adapter_that_cannot_be_read_ends_the_start(spec: ModelSpec, folder: Path) -> None:
    other = replace(spec, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"router\.lora.*tensor base_model\."):
        ServedAdapters.of([f"a={folder / 'a'}"], other, "tiny")


def test_the_setting_is_names_with_directories() -> None:
    assert RouterSettings(lora="a=/x, b=/y").lora == ("a=/x", "b=/y")  # type: ignore[arg-type]
    for wrong in ("a", "=/x", "a="):
        with pytest.raises(ValueError, match="lora"):
            RouterSettings(lora=(wrong,))


async def test_what_one_router_loads_all_serve_and_unload(spec: ModelSpec, folder: Path, tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as box:
        both = [ServedAdapters(spec, "tiny"), ServedAdapters.of([f"a={folder / 'a'}"], spec, "tiny")]
        stores = [AdapterStore(box.url_through(box.port), "ns") for _ in both]
        first, second = (SharedAdapters(*each) for each in zip(stores, both, strict=True))
        served = await first.load("b", str(folder / "b"))
        await second.follow()
        await first.follow()
        assert [each.all for each in both] == [(served,), (both[1].all[0], served)]
        await first.unload("b")
        await second.follow()
        assert [[each.name for each in adapters.all] for adapters in both] == [[], ["a"]]
        for store in stores:
            await store.close()


async def test_a_redis_that_lost_everything_hears_it_again_and_what_was_unloaded_stays_so(
    spec: ModelSpec, folder: Path, tmp_path: Path
) -> None:
    with redis_box(binaries()[0], tmp_path) as box:
        url = box.url_through(box.port)
        first, second = ServedAdapters(spec, "tiny"), ServedAdapters(spec, "tiny")
        stores = [AdapterStore(url, "ns") for _ in range(2)]
        one, other = SharedAdapters(stores[0], first), SharedAdapters(stores[1], second)
        await one.follow()
        for name in "ab":
            await one.load(name, str(folder / name))
        await other.follow()
        await other.unload("b")
        await one.follow()
        redis = connect(url, 5.0)
        await redis.flushall()
        await one.follow()
        await other.follow()
        assert [[each.name for each in adapters.all] for adapters in (first, second)] == [["a"], ["a"]]
        later = ServedAdapters(spec, "tiny")
        await SharedAdapters(stores[0], later).follow()
        assert later.all == first.all
        await one.unload("a")
        await other.follow()
        assert second.all == (), "the last one, too, is unloaded everywhere"
        await redis.aclose()
        for store in stores:
            await store.close()


async def test_without_redis_nothing_changes(spec: ModelSpec, folder: Path) -> None:
    adapters = ServedAdapters(spec, "tiny")
    store = AdapterStore("redis://127.0.0.1:1", "ns")
    shared = SharedAdapters(store, adapters)
    with pytest.raises(PdserveError, match="Redis"):
        await shared.load("b", str(folder / "b"))
    assert adapters.all == ()
    adapters.add(adapters.read("b", str(folder / "b")))
    with pytest.raises(PdserveError, match="Redis"):
        await shared.unload("b")
    with pytest.raises(PdserveError, match="Redis"):
        await shared.load("b", str(folder / "b"))
    assert adapters.get("b") is not None, "it was served before"
    await store.close()


async def test_what_was_read_of_redis_during_a_change_does_not_count(spec: ModelSpec, folder: Path) -> None:
    adapters, is_written = ServedAdapters(spec, "tiny"), asyncio.Event()

    class SlowStore(AdapterStore):
        async def all(self) -> AdapterRecords | None:
            return AdapterRecords({}, is_whole=True)

        async def put(self, name: str, record: AdapterRecord) -> None:
            await is_written.wait()

    store = SlowStore("redis://127.0.0.1:1", "ns")
    shared = SharedAdapters(store, adapters)
    loading = asyncio.create_task(shared.load("b", str(folder / "b")))
    async with asyncio.timeout(30):
        while adapters.get("b") is None:  # noqa: ASYNC110 - looks at a state that has no event
            await asyncio.sleep(0.005)
    await shared.follow()
    assert adapters.get("b") is not None
    is_written.set()
    await loading
    await shared.follow()
    assert adapters.get("b") is None, "what stands in Redis after a change counts"
    await store.close()


async def test_a_record_without_a_digest_names_no_adapter(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as box:
        store = AdapterStore(box.url_through(box.port), "ns")
        await store.put("good", AdapterRecord("d" * 64, "/a", 1))
        for digest in ("", "d" * 63, "D" * 64):
            await store.put(f"bad{len(digest)}", AdapterRecord(digest, "/a", 1))
        found = await store.all()
        assert found is not None
        assert list(found.by_name) == ["good"]
        await store.close()
