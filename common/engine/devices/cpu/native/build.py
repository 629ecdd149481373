"""Compiles `ops.cpp` and its headers at first use, into the cache directory. Without a compiler there is no library.

Safe for processes that start at once: each compiles into a file of its own and renames it. The name is a digest of
the source, the flags, the compiler and the processor, so a stale or foreign library is never loaded.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from common.checkpoint.demo_model import cache_directory
from common.telemetry.logs import get_logger

SOURCE = Path(__file__).with_name("ops.cpp")
SWITCH = "PDSERVE_NATIVE_OPS"  # 0 = never compile or load
FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
TIMEOUT_S = 120
MAX_LOGGED = 2000  # characters of what the compiler said; the file has them all
# What it says when a program that it had started was killed, or found no room: g++ itself then ends as on an error.
NO_REFUSAL = re.compile(
    "killed|terminated (by|with) signal|out of memory|allocate memory|exhausted|no space left", re.I
)


def load_library() -> ctypes.CDLL | None:
    """The compiled operators; None where they are switched off, no compiler is there or it fails (which is logged)."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        path = _library_path(compiler)
        if _failure(path).exists():
            get_logger().warning("native_compile_failed_before", reason=_failure(path).read_text()[:200])
            return None
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except subprocess.SubprocessError:
        return None
    except OSError as error:
        get_logger().warning("native_operators_not_loaded", reason=str(error))
        return None


def state_of_library() -> tuple[bool, str]:
    """Whether the operators can be used here, and what to know about it. Compiles nothing."""
    if os.environ.get(SWITCH, "1") == "0":
        return False, f"switched off by {SWITCH}=0"
    compiler = _compiler()
    if compiler is None:
        return False, "no C++ compiler (g++, or what CXX names)"
    try:
        path = _library_path(compiler)
        if _failure(path).exists():
            return False, f"{compiler} failed, see {_failure(path)}"
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{compiler}: {error}"
    return True, f"compiled at {path}" if path.exists() else f"compiled by {compiler} at the first start"


def _compiler() -> str | None:
    is_off = os.environ.get(SWITCH, "1") == "0" or platform.system() != "Linux"
    return None if is_off else shutil.which(os.environ.get("CXX", "g++"))


def _library_path(compiler: str) -> Path:
    return cache_directory() / "native" / f"ops-{_digest(compiler)}.so"


def _failure(library: Path) -> Path:
    """Where it is remembered that the compiler refused: the same sources and compiler fail again."""
    return library.with_suffix(".failed")


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        compiled, linked = Path(directory) / "ops.o", Path(directory) / "ops.so"
        try:
            _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), *_openmp(), "-o", str(linked))
        except subprocess.SubprocessError as error:
            output = getattr(error, "stderr", None) or b""
            reason = f"{error}\n{output.decode(errors='replace')}"
            get_logger().warning("native_compile_failed", compiler=compiler, reason=reason[:MAX_LOGGED])
            if _is_refusal(error, reason):
                _failure(target).write_text(reason)
            raise
        os.replace(linked, target)


def _is_refusal(error: subprocess.SubprocessError, reason: str) -> bool:
    """Not what a busy machine did not finish, nor what was killed: that may go well another time."""
    is_said = isinstance(error, subprocess.CalledProcessError) and error.returncode > 0
    return is_said and not NO_REFUSAL.search(reason)


def _run(*command: str) -> None:
    env = {**os.environ, "LC_ALL": "C"}
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True, env=env)


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
