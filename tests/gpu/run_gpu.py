"""`make gpu`: the checks and measurements that need a GPU, in under eight minutes.

`python -m tests.gpu.run_gpu [--checks-only]`. Without a GPU it says that nothing was run, and fails nothing.
Another stage is one more function in STAGES: it takes the report and fills it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu.correctness import check_kernels
from tests.gpu.report import Report
from tests.gpu.speed import measure_kernels

Stage = Callable[[Report], None]
CHECKS: tuple[Stage, ...] = (check_kernels,)
STAGES: tuple[Stage, ...] = (*CHECKS, measure_kernels)
RESULTS = Path("build/gpu.json")


def reason_not_to_run() -> str | None:
    """Why nothing can be said about a GPU here, or None."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: kernels would run on the CPU"
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    return None


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
    for stage in CHECKS if options.checks_only else STAGES:
        start = time.monotonic()
        stage(report)
        print(f"-- {stage.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    report.write(RESULTS)
    print(f"{report.num_checks} checks, {len(report.failures)} failed; measurements in {RESULTS}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
