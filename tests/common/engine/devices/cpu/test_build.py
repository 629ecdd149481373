"""Compiling at first use: cached, safe side by side, and harmless where it can't be done."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.engine.devices.cpu.native import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    return tmp_path / "native"


def stub_compiler(tmp_path: Path, body: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_or_when_switched_off_there_is_no_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.load_library() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.load_library() is None
    assert not cache.exists()


def test_a_compiler_that_fails_is_heard_once_and_not_asked_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. what it said is logged and kept; 2. the next start finds that and leaves it in peace; 3. doctor says so."""
    body = f'[ "$1" = --version ] || {{ echo once >> {tmp_path}/asked; echo broken >&2; exit 1; }}'
    monkeypatch.setenv("CXX", stub_compiler(tmp_path, body))
    with capture_logs() as logs:
        assert build.load_library() is None
        assert build.load_library() is None
    assert [line["event"] for line in logs] == ["native_compile_failed", "native_compile_failed_before"]
    assert "broken" in logs[0]["reason"]
    assert (tmp_path / "asked").read_text() == "once\n"
    (kept,) = cache.iterdir()
    assert "broken" in kept.read_text()
    assert build.state_of_library() == (False, f"{tmp_path / 'compiler'} failed, see {kept}")


NOT_ITS_FAULT = [
    "kill -9 $$",
    "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
    "echo 'collect2: fatal error: ld terminated with signal 9 [Killed]' >&2; exit 1",
    "echo 'cc1plus: out of memory allocating 65536 bytes' >&2; exit 1",
    "echo '/tmp/cc.s: No space left on device' >&2; exit 1",
]


@pytest.mark.parametrize("end", NOT_ITS_FAULT)
def test_a_compiler_that_was_killed_or_had_no_room_is_asked_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    body = f'[ "$1" = --version ] || {{ echo asked >> {tmp_path}/asked; {end}; }}'
    monkeypatch.setenv("CXX", stub_compiler(tmp_path, body))
    assert build.load_library() is None
    assert build.load_library() is None
    assert (tmp_path / "asked").read_text() == "asked\n" * 2
    assert list(cache.iterdir()) == []


def test_a_compiler_that_a_busy_machine_did_not_finish_is_asked_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(*command: str) -> None:
        asked.append(command[0])
        subprocess.run(["sleep", "60"], check=True, timeout=0.01)

    monkeypatch.setenv("CXX", stub_compiler(tmp_path, "exit 0"))
    monkeypatch.setattr(build, "_run", run)
    assert build.load_library() is None
    assert build.load_library() is None
    assert asked == [str(tmp_path / "compiler")] * 2
    assert list(cache.iterdir()) == []


def test_another_compiler_is_tried_after_one_failed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", stub_compiler(tmp_path, '[ "$1" = --version ] || exit 1'))
    assert build.load_library() is None
    monkeypatch.setenv("CXX", stub_compiler(tmp_path, f"{ANSWERS_VERSION}; {WRITES_LAST}"))
    assert build.state_of_library()[0]
    build.load_library()
    assert sorted(path.suffix for path in cache.iterdir()) == [".failed", ".so"]


def test_the_state_names_what_keeps_the_operators_away(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.state_of_library() == (False, "no C++ compiler (g++, or what CXX names)")
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.state_of_library() == (False, f"switched off by {build.SWITCH}=0")


def test_a_cache_that_cannot_be_written_means_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file"))
    assert build.load_library() is None


ANSWERS_VERSION = '[ "$1" != --version ] || { echo 1; exit; }'
WRITES_LAST = 'for last; do :; done; echo x > "$last"'


def test_processes_that_start_at_once_end_with_one_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub writes its last argument, as a compiler its output; what it writes is no library, so loading fails."""
    monkeypatch.setenv("CXX", stub_compiler(tmp_path, f"{ANSWERS_VERSION}; {WRITES_LAST}"))
    with ThreadPoolExecutor(4) as pool:
        loaded = [future.result() for future in [pool.submit(build.load_library) for _ in range(4)]]
    assert loaded == [None] * 4
    assert [path.suffix for path in cache.iterdir()] == [".so"]
