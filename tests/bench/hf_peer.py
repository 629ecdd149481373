"""Hugging Face transformers in an environment of its own, driven over a pipe so that it takes turns with us.

`install` makes build/peers/transformers from PyPI; it shares this environment's torch, so both sides run the same one.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

HOME = Path("build/peers/transformers")
PACKAGES = ("transformers==4.57.3", "accelerate==1.12.0")
_CHILD = Path(__file__).with_name("hf_child.py")


class SizedWork(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def new(self) -> int: ...


def hf_python() -> Path | None:
    """The interpreter that has transformers, once installed."""
    python = HOME / "bin" / "python"
    return python if (HOME / "installed").exists() else None


def install() -> None:
    """Idempotent."""
    if hf_python() is not None:
        return
    subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    site = next((HOME / "lib").glob("python*/site-packages"))
    (site / "shared_torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([str(HOME / "bin" / "pip"), "install", "--quiet", *PACKAGES], check=True)
    (HOME / "installed").touch()


class HfPeer:
    """One child process with the model loaded."""

    def __init__(self, model_path: Path, dtype: torch.dtype, num_threads: int) -> None:
        command = [str(hf_python()), str(_CHILD), str(model_path), str(dtype).removeprefix("torch."), str(num_threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    def timer(self, work: SizedWork) -> Callable[[], float]:
        """A call runs `work` once and answers its seconds."""

        def call() -> float:
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps([work.kind, work.batch, work.new]) + "\n")
            self._child.stdin.flush()
            return float(self._read())

        return call

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)

    def _read(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()
