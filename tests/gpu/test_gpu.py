"""The GPU run as a test where there is a GPU; where there is none, that it says so and that its code works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()

from tests.cluster.load import random_cases  # noqa: E402
from tests.common.engine.devices.triton.cases import Shape  # noqa: E402
from tests.common.engine.devices.triton.checks import GRIDS  # noqa: E402
from tests.gpu import correctness, engine, service, speed  # noqa: E402
from tests.gpu import run_gpu as run_gpu_module  # noqa: E402
from tests.gpu.report import Measurement, Report  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

TINY = speed.Sizes(
    heads=((4, 2, 16),),
    prefill=((2, 0, 20), (1, 16, 5)),
    decode=((2, 33),),
    num_tokens=20,
    hidden=32,
    num_layers=2,
    logits=(2, 300),
    ceiling_dim=16,
)


def run_gpu(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "tests.gpu.run_gpu", "--checks-only"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_are_right_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("not run: no GPU")
    result = run_gpu()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 failed" in result.stdout


def test_without_a_gpu_the_run_says_that_nothing_was_checked() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = run_gpu()
    assert result.returncode == 0, result.stderr
    assert result.stdout == "not run: no GPU: torch.cuda.is_available() is false. No GPU check was made.\n"


def test_with_the_interpreter_on_the_run_says_that_nothing_was_checked() -> None:
    result = run_gpu(TRITON_INTERPRET="1")
    assert result.stdout.startswith("not run: TRITON_INTERPRET is set")


def test_every_kernel_is_measured(tmp_path: Path) -> None:
    """The measuring code itself, on tiny sizes under the interpreter."""
    report = Report()
    speed.measure_kernels(report, TINY, device="cpu")
    assert [x.metric.split()[0] for x in report.measurements] == [
        *("prefill", "prefill", "decode", "decode_int8", "decode_float8_e4m3fn", "rope_and_write", "pack", "unpack"),
        *("add_rms_norm", "silu_mul", "sample_best", "sample_filter", "sample_draw"),
    ]
    assert all(x.ours > 0 and x.floor for x in report.measurements)
    report.write(tmp_path / "build" / "gpu.json")
    assert '"metric": "prefill 4/2x16 2 x (0+20)"' in (tmp_path / "build" / "gpu.json").read_text()


def test_work_gives_the_same_as_its_peers() -> None:
    """Otherwise the comparison means nothing. Attention peers read other keys by design, copies return nothing."""
    compared = [work for work in speed.all_work(TINY, "cpu") if work.name.startswith(("add_rms_norm", "silu_mul"))]
    assert len(compared) == 2
    for work in compared:
        ours = work.ours()
        ours = ours[0] if isinstance(ours, tuple) else ours
        torch.testing.assert_close(ours, work.peers["torch"](), rtol=2**-5, atol=2**-6)


def test_a_failed_check_is_reported_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert correctness.run_case("silu_mul", 3, "cpu") is None
    grid = GRIDS["silu_mul"]
    monkeypatch.setitem(GRIDS, "silu_mul", type(grid)(_fail, grid.cases))
    error = correctness.run_case("silu_mul", 3, "cpu")
    report = Report()
    report.check("silu_mul", error)
    assert report.failures == ["silu_mul: AssertionError: off by one"]


def test_jobs_run_in_processes_and_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the child processes
    report = Report()
    correctness.check_jobs(report, [("silu_mul", 5), ("gather_rows", 3)], "cpu")
    assert report.num_checks == 2
    assert report.failures == []


def test_repeats_are_bit_equal_under_the_interpreter_too() -> None:
    correctness.repeat_bit_equal(Shape(head_dim=16), num_repeats=1)


def test_last_block_of_a_pool_is_written_and_read() -> None:
    correctness.use_last_block(5, "cpu")


def test_draws_on_the_device_are_those_of_the_cpu() -> None:
    engine.draw_the_same_tokens("cpu", vocab_size=600)


def test_generating_with_and_without_graphs_is_the_same_code_where_there_is_none(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    outputs = [engine.generate(path, "int8", has_graphs=has, attention="cpu") for has in (False, True)]
    assert outputs[0] == outputs[1]
    assert [len(output) for output in outputs[0]] == [4, 6, 8, 10, 12]


@pytest.mark.cluster
def test_the_service_is_checked_and_timed(tmp_path: Path) -> None:
    """The stage of a GPU on the CPU's kernels."""
    model = write_tiny_model(tmp_path / "tiny")
    assert service.exactness_error(model, "cpu", random_cases(3, seed=1, max_tokens=5)) is None
    report = Report()
    service.measure(report, "service", model, ("--attention", "cpu"), service.Load(4, 2, 10, 5))
    assert [(x.unit, x.better) for x in report.measurements] == [("tok/s", "higher"), *[("ms", "lower")] * 3]
    assert all(x.ours > 0 for x in report.measurements)


def test_a_stage_that_breaks_is_a_failure_and_one_without_time_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 0.0, 100.0, 100.0, 400.0, 400.0])

    def broken(report: Report) -> None:
        raise RuntimeError("no memory")

    def fine(report: Report) -> None:
        report.check("fine", None)

    report = Report()
    run_gpu_module.run_stages(report, (broken, fine, fine), lambda: next(clock))
    assert report.failures == ["broken: RuntimeError: no memory"]
    assert report.num_checks == 3
    assert "-- fine: not run, no time left" in capsys.readouterr().out


def test_timings_become_rates_and_percentiles() -> None:
    timings = [service.Timing(0.2, (0.01, 0.03)), service.Timing(0.4, (0.02, 0.04))]
    rate, ttft, gap, worst = (x.ours for x in service._measurements("s", timings, 2.0))
    assert (rate, ttft, gap) == pytest.approx((3.0, 300.0, 25.0))
    assert worst == pytest.approx(30.0)


def test_measurement_line_names_the_ceiling_and_the_peers() -> None:
    line = Measurement("decode", "GB/s", 2000.0, {"sdpa": 1500.0}, 4000.0).line()
    assert "2000 GB/s" in line
    assert "50.0% of ceiling" in line
    assert "sdpa 1500" in line
    assert "ceiling" not in Measurement("TTFT", "ms", 20.0, {}, None, "lower").line()


def _fail(case: object, device: str) -> None:
    raise AssertionError("off by one")
