"""The first minutes on a GPU, stage by stage: the cheapest and deadliest first, without Ray and without a registry.

`make gpu STAGE=all`, or names separated by commas. Each stage runs in a process of its own under a limit, so that one
which hangs or breaks the device takes nothing with it; what it found is in build/gpu/NAME.json before the next begins.
All limits together are under 15 minutes. `--device cpu` rehearses the same code where there is no GPU.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.report import Report, error_of
from tests.gpu.run_gpu import reason_not_to_run

OUT = Path("build/gpu")
CUDA = "cuda"
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Stage:
    """`run` takes the report and the device, "cuda" or "cpu". What it imports it imports itself."""

    name: str
    limit_s: float
    run: Callable[[Report, str], None]


def environment(report: Report, device: str) -> None:
    """What is here, and whether a kernel compiles and runs at all."""
    import triton

    from tests.gpu.correctness import run_case

    print(f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}")
    has_compiler = shutil.which("gcc") or shutil.which("clang")
    report.check("a C compiler for Triton's launcher", None if has_compiler else "none on PATH")
    if device == CUDA:
        report.check("torch sees a GPU", None if torch.cuda.is_available() else "torch.cuda.is_available() is false")
        print_gpus(torch.cuda)
    report.check("a kernel runs", run_case("silu_mul", 0, device))


def print_gpus(cuda: Any) -> None:
    """`cuda`: torch's, or what a test has in its place."""
    for idx in range(cuda.device_count()):
        free, total = cuda.mem_get_info(idx)
        uuid = cuda.get_device_properties(idx).uuid
        print(f"GPU {idx}: {cuda.get_device_name(idx)}, {uuid}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")


def engine(report: Report, device: str) -> None:
    """Draws, replayed against launched generations for every kind of cache, copies beside compute."""
    from tests.gpu import engine as checks

    if device == CUDA:
        checks.check_engine(report)
        return
    report.check("draws", error_of(lambda: checks.draw_the_same_tokens("cpu", vocab_size=600)))
    report.check("generations", error_of(lambda: checks.replay_a_generation("cpu", ("auto",))))


def device_faults(report: Report, device: str) -> None:
    """A step without memory, and an error that stays."""
    from tests.gpu.device_faults import end_by_an_error_that_stays, outlive_a_step_without_memory

    for check in (outlive_a_step_without_memory, end_by_an_error_that_stays):
        report.check(check.__name__, error_of(lambda check=check: check(device)))  # type: ignore[misc]


def kernels(report: Report, device: str) -> None:
    """Every kernel against its reference."""
    from tests.gpu.correctness import check_jobs, check_kernels

    if device == CUDA:
        check_kernels(report)
    else:
        check_jobs(report, [("silu_mul", 5), ("gather_rows", 3)], device)


def service(report: Report, device: str) -> None:
    """Router, prefill and decode worker on one card, and a worker killed."""
    from tests.gpu.bare_service import check_bare_service

    check_bare_service(report, *(("triton", 16) if device == CUDA else ("cpu", 4)))


def shapes(report: Report, device: str) -> None:
    """Where a step's time goes, in a model of a common size."""
    from tests.gpu.shapes import ONE_BILLION, Sizes, measure_shapes
    from tests.tiny_model import TinyModel

    small = Sizes(TinyModel(), rows=(1, 2), lens=(40,), prompts=(20,), num_repeats=1)
    measure_shapes(report, device, ONE_BILLION if device == CUDA else small)


def speed(report: Report, device: str) -> None:
    """Kernels beside torch's, as shares of what the card can do."""
    from tests.gpu.speed import FULL, Sizes, measure_kernels

    if device == CUDA:
        measure_kernels(report, replace(FULL, heads=((32, 8, 128),)), device)
        return
    tiny: dict[str, Any] = {"prefill": ((1, 0, 9),), "decode": ((1, 9),), "num_tokens": 9, "hidden": 16}
    measure_kernels(report, Sizes(((4, 2, 16),), **tiny, num_layers=1, logits=(1, 64), ceiling_dim=16), device)


def nccl(report: Report, device: str) -> None:
    """What the link needs of torch's group, in one process; between two GPUs where there are two."""
    from tests.gpu.nccl_pairs import check_nccl_api, check_nccl_pairs

    if device == CUDA:
        report.check("NCCL's interface", error_of(check_nccl_api))
    check_nccl_pairs(report)


STAGES = (
    Stage("environment", 60, environment),
    Stage("engine", 90, engine),
    Stage("faults", 60, device_faults),
    Stage("kernels", 150, kernels),
    Stage("service", 150, service),
    Stage("shapes", 180, shapes),
    Stage("nccl", 120, nccl),
    Stage("speed", 80, speed),
)


def stages_named(names: str) -> tuple[Stage, ...]:
    """Raises SystemExit for one that there is not."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in wanted if name not in known and name != "all"]:
        raise SystemExit(f"no such stage: {', '.join(unknown)}; there are all, {', '.join(known)}")
    return STAGES if "all" in wanted else tuple(known[name] for name in wanted)


def run_in_a_process(stage: Stage, device: str, out: Path) -> dict[str, Any]:
    """What came of it, which is in its file too; a stage that is over its limit or dies has what it printed."""
    path = out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.stages", "--child", stage.name, "--device", device, "--out", str(out)]
    environment = os.environ | ({} if device == CUDA else {"TRITON_INTERPRET": "1"})
    start_s = time.monotonic()
    with (out / f"{stage.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            ended = f"ended with {process.wait(stage.limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes that it has started
            process.wait()
            ended = f"over its limit of {stage.limit_s:g} s"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
    else:
        found = {"stage": stage.name, "num_checks": 1, "failures": [f"{stage.name}: {ended}"], "measurements": []}
    found |= {"seconds": round(time.monotonic() - start_s, 1), "device": device}
    found["output"] = (out / f"{stage.name}.log").read_text(errors="replace")[-_TAIL:]
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def run_here(stage: Stage, device: str, out: Path) -> None:
    """The child: the file is written whatever the stage raises."""
    report = Report()
    report.check(stage.name, error_of(lambda: stage.run(report, device)))
    found = {"stage": stage.name, "num_checks": report.num_checks, "failures": report.failures}
    found["measurements"] = [asdict(each) for each in report.measurements]
    (out / f"{stage.name}.json").write_text(json.dumps(found) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stages", description=__doc__)
    parser.add_argument("--stage", default="all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", default="", help="run this stage in this process")
    options = parser.parse_args(arguments)
    reason = reason_not_to_run() if options.device == CUDA else None
    if reason is not None:
        print(f"not run: {reason}. No GPU check was made.")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        (stage,) = stages_named(options.child)
        run_here(stage, options.device, options.out)
        return 0
    num_failed = 0
    for stage in stages_named(options.stage):
        found = run_in_a_process(stage, options.device, options.out)
        num_failed += len(found["failures"])
        counts = f"{found['num_checks']} checks, {len(found['failures'])} failed"
        print(f"{stage.name}: {counts}, {found['seconds']} s", flush=True)
        print("".join(f"  {failure}\n" for failure in found["failures"]), end="", flush=True)
    print(f"what was found, and measured, is in {options.out}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
