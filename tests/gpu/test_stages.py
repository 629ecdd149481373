"""The stages of a GPU run, rehearsed where there is none: the same code under the interpreter, so none is mistyped."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()

from tests.gpu import nccl_pairs, stages  # noqa: E402
from tests.gpu.report import Report  # noqa: E402
from tests.gpu.stages import STAGES, Stage, run_here, run_in_a_process, stages_named  # noqa: E402

NEEDS_PROCESSES = ("service",)


@pytest.mark.parametrize("stage", [each for each in STAGES if each.name not in NEEDS_PROCESSES], ids=lambda s: s.name)
def test_a_stage_runs_to_its_end(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for its processes
    run_here(stage, "cpu", tmp_path)
    found = json.loads((tmp_path / f"{stage.name}.json").read_text())
    assert found["failures"] == []
    assert bool(found["measurements"]) == (stage.name in ("shapes", "speed"))
    assert found["num_checks"] >= 1


@pytest.mark.cluster
def test_the_service_without_ray_is_exact_over_a_killed_worker(tmp_path: Path) -> None:
    (stage,) = stages_named("service")
    run_here(stage, "cpu", tmp_path)
    found = json.loads((tmp_path / "service.json").read_text())
    assert (found["num_checks"], found["failures"]) == (3, [])


@pytest.mark.parametrize("check", [nccl_pairs.carry_in_order, nccl_pairs.outlive_a_killed_peer])
def test_what_is_asked_of_nccl_is_what_gloo_does(check: Callable[[str], None]) -> None:
    """The same two processes over the link that runs here."""
    check("gloo")


def test_all_stages_together_take_less_than_a_quarter_of_an_hour() -> None:
    assert sum(stage.limit_s for stage in STAGES) < 900


def test_every_gpu_is_printed_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    cuda = SimpleNamespace(
        device_count=lambda: 1,
        mem_get_info=lambda _: (int(70e9), int(80e9)),
        get_device_name=lambda _: "H200",
        get_device_properties=lambda _: SimpleNamespace(uuid="GPU-1"),
    )
    stages.print_gpus(cuda)
    assert capsys.readouterr().out == "GPU 0: H200, GPU-1, 70.0 of 80.0 GB free\n"


def hang(report: Report, device: str) -> None:
    torch.zeros(1)


def test_a_stage_that_dies_or_hangs_is_a_failure_with_what_it_said(tmp_path: Path) -> None:
    """`--child` knows neither: the one ends at once, the other is given no time."""
    dead = run_in_a_process(Stage("unknown", 60, hang), "cpu", tmp_path)
    assert dead["failures"] == ["unknown: ended with 1"]
    assert "no such stage: unknown" in dead["output"]
    late = run_in_a_process(Stage("kernels", 0.01, hang), "cpu", tmp_path)
    assert late["failures"] == ["kernels: over its limit of 0.01 s"]
    assert json.loads((tmp_path / "kernels.json").read_text()) == late


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_no_stage_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert stages.main(["--stage", "all", "--out", str(tmp_path / "out")]) == 0
    said = "not run: no GPU: torch.cuda.is_available() is false. No GPU check was made.\n"
    assert capsys.readouterr().out == said
    assert not (tmp_path / "out").exists()


def test_stages_are_taken_by_name_in_the_order_that_is_asked_for() -> None:
    assert [stage.name for stage in stages_named("speed, engine")] == ["speed", "engine"]
    assert stages_named("all") == STAGES
    with pytest.raises(SystemExit, match="no such stage: sped"):
        stages_named("sped")


def test_a_stage_that_raises_leaves_what_it_found_before(tmp_path: Path) -> None:
    def half(report: Report, device: str) -> None:
        report.check("first", None)
        raise RuntimeError("lost")

    run_here(Stage("half", 1, half), "cpu", tmp_path)
    found = json.loads((tmp_path / "half.json").read_text())
    assert (found["num_checks"], found["failures"]) == (2, ["half: RuntimeError: lost"])
