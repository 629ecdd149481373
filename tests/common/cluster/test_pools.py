"""Pool sizes shared through Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cluster.pools import PoolStore
from common.values.errors import InvalidRequest, PdserveError
from tests.redis_box import RedisBox, binaries, redis_box

SIZES = {"prefill": 1, "decode": 2}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_a_size_set_by_others_is_what_the_controller_learns(box: RedisBox) -> None:
    controller, router = PoolStore(box.url, "learn"), PoolStore(box.url, "learn")
    assert await controller.announce(SIZES, {"note": "x"}) == SIZES
    await router.set_desired({"decode": 5})
    assert await router.get_desired() == {"prefill": 1, "decode": 5}
    assert await controller.announce(SIZES, {}) == {"prefill": 1, "decode": 5}
    await router.set_desired({"prefill": 4, "decode": 2})
    assert await controller.announce(SIZES, {}) == {"prefill": 4, "decode": 2}
    await controller.close()
    await router.close()


async def test_the_status_wants_a_size_from_the_moment_it_was_set(box: RedisBox) -> None:
    """Else `status --wait` right after a change would look at the old size and end at once."""
    controller, router = PoolStore(box.url, "now"), PoolStore(box.url, "now")
    await controller.announce(SIZES, {role: {"desired": size, "starting": 0} for role, size in SIZES.items()})
    await router.set_desired({"decode": 5})
    assert await router.get_status() == {
        "prefill": {"desired": 1, "starting": 0},
        "decode": {"desired": 5, "starting": 0},
    }
    await controller.close()
    await router.close()


async def test_sizes_cannot_be_set_where_no_controller_runs(box: RedisBox) -> None:
    store = PoolStore(box.url, "none")
    with pytest.raises(InvalidRequest, match="no pool controller"):
        await store.set_desired({"decode": 1})
    await store.announce(SIZES, {})
    await store.withdraw()
    with pytest.raises(InvalidRequest, match="no pool controller"):
        await store.set_desired({"decode": 1})
    assert await store.get_desired() is None
    assert await store.get_status() is None
    await store.close()


@pytest.mark.parametrize(("role", "replicas"), [("router", 1), ("decode", -1), ("decode", 1025)])
async def test_senseless_sizes_are_refused(box: RedisBox, role: str, replicas: int) -> None:
    store = PoolStore(box.url, "senseless")
    await store.announce(SIZES, {})
    with pytest.raises(InvalidRequest):
        await store.set_desired({role: replicas})
    assert await store.get_desired() == SIZES
    await store.close()


async def test_a_redis_that_lost_everything_gets_the_controllers_sizes_again(box: RedisBox) -> None:
    store = PoolStore(box.url, "wiped")
    await store.announce(SIZES, {})
    box.client().flushall()
    assert await store.announce({"prefill": 3, "decode": 4}, {}) == {"prefill": 3, "decode": 4}
    await store.close()


async def test_every_key_expires(box: RedisBox) -> None:
    store = PoolStore(box.url, "expire")
    await store.announce(SIZES, {"note": "x"})
    client = box.client()
    names = list(client.scan_iter("expire:*"))
    assert len(names) == 2
    assert all(client.ttl(name) > 0 for name in names)
    await store.close()


async def test_what_others_wrote_there_is_not_believed(box: RedisBox) -> None:
    store, client = PoolStore(box.url, "poison"), box.client()
    await store.announce(SIZES, {})
    client.hset("poison:pools", "decode", "9" * 1000)
    assert await store.get_desired() is None
    client.set("poison:pools:status", b"\x80\x04pickle")
    assert await store.get_status() is None
    client.set("poison:pools:status", b"[1]")
    assert await store.get_status() is None
    client.delete("poison:pools")
    client.rpush("poison:pools", "x")
    assert await store.get_desired() is None
    assert await store.announce(SIZES, {}) is None
    await store.close()


async def test_without_redis_reading_says_unknown_and_setting_fails(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as own:
        own.kill()
        store = PoolStore(own.url, "away")
        assert await store.announce(SIZES, {}) is None
        assert await store.get_desired() is None
        assert await store.get_status() is None
        with pytest.raises(PdserveError, match="Redis cannot be reached"):
            await store.set_desired({"decode": 1})
        await store.withdraw()
        await store.close()


async def test_kept_sizes_outlive_a_controller_that_is_configured_alike(box: RedisBox) -> None:
    store, configured = PoolStore(box.url, "kept"), {"prefill": 1, "decode": 1}
    assert await store.get_kept(configured) is None
    assert await store.keep(configured, {"prefill": 2, "decode": 5})
    await store.withdraw()
    assert await store.get_kept(configured) == {"prefill": 2, "decode": 5}
    assert await store.get_kept({"prefill": 3, "decode": 1}) is None
    await store.close()


@pytest.mark.parametrize("poison", [b"x", b"[]", b"{}", b'{"configured": {"prefill": 1, "decode": 1}, "desired": 7}'])
async def test_kept_sizes_that_we_did_not_write_are_ignored(box: RedisBox, poison: bytes) -> None:
    store = PoolStore(box.url, "kept-poison")
    box.client().set("kept-poison:pools:kept", poison)
    assert await store.get_kept({"prefill": 1, "decode": 1}) is None
    await store.close()


async def test_nothing_is_kept_while_redis_is_away() -> None:
    store = PoolStore("redis://127.0.0.1:1/0", "away")
    assert not await store.keep({"prefill": 1, "decode": 1}, {"prefill": 1, "decode": 1})
    assert await store.get_kept({"prefill": 1, "decode": 1}) is None
    await store.close()
