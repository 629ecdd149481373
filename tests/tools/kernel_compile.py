"""Compile kernels for a target that need not be there: the real launch code runs, the launch itself is left out.

So what is looked at is what a GPU of that kind would run: the same tiles, constants and pointer alignment.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_NVIDIA_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d+))?\.[bufs](\d+)\b")
_NVIDIA_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_AMD_LOAD = re.compile(r"\b(?:buffer|global)_load_(dwordx?\d?|[us]?short\w*|[us]byte\w*)")
_MATRIX = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma)")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the compiler made of one kernel."""

    kernel: str
    target: str
    registers: int
    shared_bytes: int
    spilled: int  # bytes of stack (NVIDIA) or spilled registers (AMD)
    load_bytes: tuple[int, ...]  # widths of the global loads that occur, ascending
    matrix: str  # the matrix instruction, or ""


class _AbsentDevice:
    """A triton driver that answers what compiling asks, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._name]

    def get_current_device(self) -> str:
        return self._name  # kernels are cached per device

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_launches(target: str, run: Callable[[], Any]) -> list[Facts]:
    """Facts of every kernel that `run` launches, compiled for `target`."""
    compiled: list[tuple[str, Any]] = []
    with _compiling_only(target, compiled):
        run()
    return [_facts(name, target, kernel) for name, kernel in compiled]


@contextmanager
def _compiling_only(target: str, compiled: list[tuple[str, Any]]) -> Iterator[None]:
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(_AbsentDevice(target))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


def _facts(name: str, target: str, kernel: Any) -> Facts:
    if "ptx" in kernel.asm:
        text = kernel.asm["ptx"]
        registers, spilled = _nvidia_usage(kernel.asm["cubin"])
        widths = {int(count or 1) * int(bits) // 8 for count, bits in _NVIDIA_LOAD.findall(text)}
        widths |= {int(width, 0) for width in _NVIDIA_ASYNC.findall(text)}
    else:
        text = kernel.asm["amdgcn"]
        registers, spilled = _amd_usage(text)
        widths = {_amd_width(suffix) for suffix in _AMD_LOAD.findall(text)}
    matrix = sorted(set(_MATRIX.findall(text)))
    return Facts(name, target, registers, kernel.metadata.shared, spilled, tuple(sorted(widths)), ", ".join(matrix))


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) by cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", result.stdout))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _amd_usage(text: str) -> tuple[int, int]:
    """(vector registers, spilled registers and bytes of scratch) by the kernel's metadata."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found, key
        return int(found[1])

    return number("vgpr_count"), number("vgpr_spill_count") + number("private_segment_fixed_size")


def _amd_width(suffix: str) -> int:
    if suffix.startswith("dword"):
        return 4 * int(suffix.removeprefix("dword").removeprefix("x") or 1)
    return 2 if "short" in suffix else 1
