"""Keys from files: read at the start, again when they change, and never less safe when a file is wrong."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import pytest
import pytest_asyncio

from common.values.config import ModelConfig, RouterConfig
from common.values.errors import InvalidApiKey
from deploy.cli.keys import hash_line, run_new
from router.tenants import key_watch
from router.tenants.access import Access
from router.tenants.key_file import InvalidKeyFile
from router.tenants.key_watch import keys_in_force
from tests.waiting import until

OLD, NEW = "pds-old", "pds-new"


class Counted:
    """Metrics of which only the names are kept."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.names.append(name)

    def set(self, name: str, value: float, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...


def file_text(*keys: str) -> str:
    lines = "".join(f"\n    - {hash_line(key)}" for key in keys)
    return f"cache_salt_secret: {'ab' * 32}\ntenants:\n  acme:\n    keys:{lines or ' []'}\n"


def config(**fields: str) -> RouterConfig:
    return RouterConfig(model=ModelConfig(), **fields)  # type: ignore[arg-type]


def lets_in(access: Access, key: str) -> bool:
    try:
        access.tenant([f"Bearer {key}".encode()])
    except InvalidApiKey:
        return False
    return True


def becomes(check: Callable[[], bool]) -> Awaitable[None]:
    async def is_so() -> bool:
        return check()

    return until(is_so)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_watch, "INTERVAL_S", 0.01)


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Path, Access, Counted]]:
    path, metrics = tmp_path / "keys.yaml", Counted()
    path.write_text(file_text(OLD))
    async with keys_in_force(config(api_keys_file=str(path)), metrics) as access:
        yield path, access, metrics


async def test_a_key_is_added_and_another_withdrawn_without_a_restart(
    watched: tuple[Path, Access, Counted],
) -> None:
    path, access, _ = watched
    assert (lets_in(access, OLD), lets_in(access, NEW)) == (True, False)
    path.write_text(file_text(OLD, NEW))
    await becomes(lambda: lets_in(access, NEW))
    assert lets_in(access, OLD)
    path.write_text(file_text(NEW))
    await becomes(lambda: not lets_in(access, OLD))
    assert lets_in(access, NEW)


async def test_a_secret_that_is_replaced_as_kubernetes_does_is_seen(tmp_path: Path) -> None:
    for name, key in (("first", OLD), ("second", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.yaml").write_text(file_text(key))
    (tmp_path / "data").symlink_to("first")
    async with keys_in_force(config(api_keys_file=str(tmp_path / "data" / "keys.yaml")), Counted()) as access:
        assert lets_in(access, OLD)
        (tmp_path / "next").symlink_to("second")
        os.replace(tmp_path / "next", tmp_path / "data")
        await becomes(lambda: lets_in(access, NEW))
        assert not lets_in(access, OLD)


@pytest.mark.parametrize("wrong", ["tenants: [", "", "cache_salt_secret: x\ntenants: {}\n", None])
async def test_a_file_that_becomes_wrong_leaves_the_keys_in_force_and_is_told_once(
    watched: tuple[Path, Access, Counted], wrong: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, access, metrics = watched
    path.unlink() if wrong is None else path.write_text(wrong)
    await becomes(lambda: bool(metrics.names))
    assert metrics.names == ["pdserve_key_file_errors"]
    assert lets_in(access, OLD)
    assert "key_file_refused" in capsys.readouterr().out
    path.write_text(file_text(NEW))
    await becomes(lambda: lets_in(access, NEW))


async def test_a_change_that_could_not_be_read_is_tried_again_and_told_once(
    watched: tuple[Path, Access, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, access, metrics = watched
    num_tries = 0

    def refused(*args: object, **kwargs: object) -> NoReturn:
        nonlocal num_tries
        num_tries += 1
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, file_text(NEW).encode())
        os.close(descriptor)
        await becomes(lambda: num_tries >= 3)
        assert metrics.names == ["pdserve_key_file_errors"]
        assert lets_in(access, OLD)
    await becomes(lambda: lets_in(access, NEW))
    assert not lets_in(access, OLD)


async def test_no_bug_ends_the_watch(
    watched: tuple[Path, Access, Counted], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, access, metrics = watched
    with monkeypatch.context() as patch:
        patch.setattr("router.tenants.key_file.KeyFile.model_validate", lambda tree: 1 // 0)
        path.write_text(file_text(OLD, "another"))
        await becomes(lambda: bool(metrics.names))
    assert "ZeroDivisionError" in capsys.readouterr().out
    path.write_text(file_text(NEW))
    await becomes(lambda: lets_in(access, NEW))
    assert not lets_in(access, OLD)


async def test_a_file_that_is_wrong_at_the_start_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for content in (None, "tenants: 1"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(InvalidKeyFile, match=str(path)):
            async with keys_in_force(config(api_keys_file=str(path)), Counted()):
                pass


async def test_the_admin_key_is_read_from_its_file_and_changes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    path.write_text("first\n")
    async with keys_in_force(config(admin_key_file=str(path)), Counted()) as access:
        access.check_admin([], [b"first"])
        path.write_text("second\n")
        await becomes(lambda: access.is_admin([], [b"second"]) and access.tenants.are_open)
        await becomes(lambda: not _is_admin(access, b"first"))
        path.write_text("\n")  # an empty key would open administration to everybody
        await asyncio.sleep(0)
        assert not _is_admin(access, b"")


async def test_keys_new_writes_a_file_that_a_running_router_takes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    run_new("acme", path)
    first = capsys.readouterr().out.strip()
    async with keys_in_force(config(api_keys_file=str(path)), Counted()) as access:
        assert lets_in(access, first)
        run_new("beta", path)
        second = capsys.readouterr().out.splitlines()[-1]
        await becomes(lambda: lets_in(access, second))
        assert lets_in(access, first)
    assert first not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def _is_admin(access: Access, key: bytes) -> bool:
    try:
        access.check_admin([], [key])
    except InvalidApiKey:
        return False
    return True
