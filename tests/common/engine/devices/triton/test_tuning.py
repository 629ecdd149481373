"""A choice is measured once per device, version and source, kept on disk, and never breaks a load."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
from structlog.testing import capture_logs

from common.engine.devices.triton import tuning
from common.engine.devices.triton.decode_attention import (
    DecodeTiles,
    decode_attention,
    decode_attention_reference,
    decode_candidates,
)
from common.engine.devices.triton.prefill_attention import (
    PrefillTiles,
    prefill_attention,
    prefill_attention_reference,
    prefill_candidates,
)
from common.engine.devices.triton.tuning import AttentionTiles, TuningFile, tune_attention
from tests.common.engine.devices.triton.cases import Shape, attention_case
from tests.common.engine.devices.triton.checks import compare_attention

PREFILLS, DECODES = prefill_candidates(64, torch.bfloat16), decode_candidates(64, torch.bfloat16)
NUM_CANDIDATES = len(PREFILLS) + len(DECODES)


class Clock:
    """Measures nothing: the n-th thing measured takes the n-th time."""

    def __init__(self, *times_ms: float) -> None:
        self._times_ms = times_ms
        self.num_measured = 0

    def __call__(self, run: Callable[[], object]) -> float:
        self.num_measured += 1
        return self._times_ms[(self.num_measured - 1) % len(self._times_ms)]


@pytest.fixture
def file(tmp_path: Path) -> TuningFile:
    return TuningFile(tmp_path / "kernels" / "tuned.json")


def tune(file: TuningFile, clock: Clock, dtype: torch.dtype = torch.bfloat16) -> AttentionTiles:
    return tune_attention(file, torch.zeros(2, 4, 16, 2, 64, dtype=dtype), 4, 64, dtype, clock)


def test_the_fastest_is_chosen_and_kept(file: TuningFile) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    tiles = tune(file, clock)
    assert tiles.prefill == PREFILLS[1]
    assert tiles.decode == DECODES[1]
    assert clock.num_measured == NUM_CANDIDATES
    assert tune(file, Clock(1.0, 2.0, 3.0)) == tiles


def test_another_dtype_is_measured_for_itself(file: TuningFile) -> None:
    tune(file, Clock(3.0, 1.0, 2.0))
    clock = Clock(2.0, 3.0, 1.0)
    tiles = tune(file, clock, torch.float16)
    assert tiles.prefill == prefill_candidates(64, torch.float16)[2]
    assert tiles.decode == decode_candidates(64, torch.float16)[0]
    assert clock.num_measured == NUM_CANDIDATES


def test_float32_has_nothing_to_choose(file: TuningFile) -> None:
    tiles = tune(file, Clock(1.0), torch.float32)
    assert tiles.prefill == prefill_candidates(64, torch.float32)[0]


def test_what_does_not_fit_the_device_is_never_chosen(file: TuningFile) -> None:
    def measure(run: Callable[[], object]) -> float:
        raise triton.runtime.errors.OutOfResources(300_000, 200_000, "shared memory")

    kv = torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16)
    assert tune_attention(file, kv, 4, 64, torch.bfloat16, measure).decode == DECODES[0]


@pytest.mark.parametrize("content", ["", "{", '{"prefill 4/2x64": "x"}', "[1]"])
def test_a_damaged_file_is_measured_over(file: TuningFile, tmp_path: Path, content: str) -> None:
    path = tmp_path / "kernels" / "tuned.json"
    path.parent.mkdir()
    path.write_text(content)
    clock = Clock(3.0, 1.0, 2.0)
    tune(file, clock)
    assert clock.num_measured == NUM_CANDIDATES
    assert [child.name for child in path.parent.iterdir()] == ["tuned.json"]


def test_where_nothing_can_be_kept_every_start_measures(file: TuningFile, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the directory should be")
    clock = Clock(3.0, 1.0, 2.0)
    with capture_logs() as logs:
        assert tune(file, clock).decode == DECODES[1]
    assert {line["event"] for line in logs} == {"tuning_not_kept"}
    tune(file, clock)
    assert clock.num_measured == 2 * NUM_CANDIDATES


def test_a_kept_choice_beyond_the_candidates_is_the_first(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(file, Clock(3.0, 2.0, 1.0))
    monkeypatch.setattr(tuning, "decode_candidates", lambda *_: DECODES[:1])
    assert tune(file, Clock(1.0)).decode == DECODES[0]


def test_the_file_is_of_one_device_one_triton_and_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    first = TuningFile.of_device("H100")._path
    assert first.parent == tmp_path / "kernels"
    assert TuningFile.of_device("H100")._path == first
    assert TuningFile.of_device("H200")._path != first
    monkeypatch.setattr(triton, "__version__", "0.0")
    assert TuningFile.of_device("H100")._path != first


@pytest.mark.parametrize("tiles", DECODES, ids=repr)
def test_every_decode_candidate_is_right(tiles: DecodeTiles) -> None:
    case = attention_case(((300, 1), (90, 1), (17, 1)), Shape(dtype=torch.bfloat16))
    compare_attention(decode_attention, decode_attention_reference, case, tiles=tiles)


@pytest.mark.parametrize("tiles", PREFILLS, ids=repr)
def test_every_prefill_candidate_is_right(tiles: PrefillTiles) -> None:
    case = attention_case(((300, 170), (90, 40)), Shape(dtype=torch.bfloat16))
    compare_attention(prefill_attention, prefill_attention_reference, case, tiles=tiles)
