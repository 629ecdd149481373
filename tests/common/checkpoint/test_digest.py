from pathlib import Path

import pytest

from common.checkpoint.digest import EDGE_BYTES, NUM_SAMPLES, digest_files


def _file(folder: Path, size_bytes: int, *changed: int) -> Path:
    content = bytearray(size_bytes)
    for position in changed:
        content[position] ^= 1
    path = folder / "weights"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size_bytes", [0, 1, EDGE_BYTES, EDGE_BYTES + 1, 2 * EDGE_BYTES, 2 * EDGE_BYTES + 9000])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size_bytes: int) -> None:
    whole = digest_files([], [_file(tmp_path, size_bytes)])
    for position in {0, size_bytes // 2, size_bytes - 1} & set(range(size_bytes)):
        assert digest_files([], [_file(tmp_path, size_bytes, position)]) != whole


def test_a_change_all_over_the_middle_of_a_large_file_is_seen(tmp_path: Path) -> None:
    size_bytes = 16 * EDGE_BYTES
    other = range(6 * EDGE_BYTES, 7 * EDGE_BYTES)
    assert len(other) > size_bytes // NUM_SAMPLES
    assert digest_files([], [_file(tmp_path, size_bytes)]) != digest_files([], [_file(tmp_path, size_bytes, *other)])


def test_size_and_texts_count(tmp_path: Path) -> None:
    one = digest_files([b"a"], [_file(tmp_path, 10)])
    assert digest_files([b"b"], [_file(tmp_path, 10)]) != one
    assert digest_files([b"a"], [_file(tmp_path, 11)]) != one
    assert digest_files([b"a", b""], [_file(tmp_path, 10)]) != one
