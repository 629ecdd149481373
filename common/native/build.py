"""Compiles `ops.cpp` and its headers at first use, into the cache directory. Without a compiler there is no library.

Safe for processes that start at once: each compiles into a file of its own and renames it. The name is a digest of
the source, the flags, the compiler and the processor, so a stale or foreign library is never loaded.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from common.checkpoint.demo_model import cache_directory

SOURCE = Path(__file__).with_name("ops.cpp")
SWITCH = "PDSERVE_NATIVE_OPS"  # 0 = never compile or load
FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
TIMEOUT_S = 120


def load_library() -> ctypes.CDLL | None:
    """The compiled operators; None where they are switched off, no compiler is there or it fails."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if os.environ.get(SWITCH, "1") == "0" or compiler is None or platform.system() != "Linux":
        return None
    try:
        path = cache_directory() / "native" / f"ops-{_digest(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        compiled, linked = Path(directory) / "ops.o", Path(directory) / "ops.so"
        _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled))
        _run(compiler, "-shared", str(compiled), *_openmp(), "-o", str(linked))
        os.replace(linked, target)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True)


def _openmp() -> list[str]:
    """torch's own OpenMP runtime: a second one in the process would fight for the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(path) for path in bundled[:1]] or ["-lgomp"]


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, timeout=TIMEOUT_S, capture_output=True).stdout
    parts = (
        *(path.read_bytes() for path in _sources()),
        " ".join(FLAGS).encode(),
        version,
        torch.__version__.encode(),
        _processor(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _sources() -> list[Path]:
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _processor() -> bytes:
    """Model and instruction sets of the first processor: what -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    return b"\n".join(line for line in lines if line.startswith((b"model", b"flags", b"Features", b"CPU")))
