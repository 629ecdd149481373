"""`make gpu`: the checks and measurements that need a GPU, in under eight minutes.

`python -m tests.gpu.run_gpu [--checks-only]`. Without a GPU it says that nothing was run, and fails nothing.
Another stage is one more function in STAGES: it takes the report and fills it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.gpu.correctness import check_kernels
from tests.gpu.engine import check_engine
from tests.gpu.report import Report, error_of
from tests.gpu.service import check_service, measure_service
from tests.gpu.speed import measure_kernels

Stage = Callable[[Report], None]
CHECKS: tuple[Stage, ...] = (check_kernels, check_engine, check_service)
STAGES: tuple[Stage, ...] = (*CHECKS, measure_kernels, measure_service)
LAST_START_S = 360.0  # no stage is begun later: the whole ends within eight minutes
RESULTS = Path("build/gpu.json")


def reason_not_to_run() -> str | None:
    """Why nothing can be said about a GPU here, or None."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: kernels would run on the CPU"
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    return None


def run_stages(report: Report, stages: Sequence[Stage], now: Callable[[], float]) -> None:
    """One after another. A stage that fails as a whole is a failed check; one that there is no time for is not run."""
    begin = now()
    for stage in stages:
        start = now()
        if start - begin > LAST_START_S:
            print(f"-- {stage.__name__}: not run, no time left", flush=True)
            continue
        report.check(stage.__name__, error_of(lambda stage=stage: stage(report)))  # type: ignore[misc]
        print(f"-- {stage.__name__}: {now() - start:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks-only", action="store_true", help="leave the measurements out")
    options = parser.parse_args(arguments)
    reason = reason_not_to_run()
    if reason is not None:
        print(f"not run: {reason}. No GPU check was made.")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    report = Report()
    run_stages(report, CHECKS if options.checks_only else STAGES, time.monotonic)
    report.write(RESULTS)
    print(f"{report.num_checks} checks, {len(report.failures)} failed; measurements in {RESULTS}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
