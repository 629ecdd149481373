"""How kernels are compiled and launched: on a GPU, or by Triton's interpreter on CPU tensors.

The choice is Triton's and is made when it is imported: `TRITON_INTERPRET=1` must be in the environment by then.
Does not know any kernel.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton


class Kernel(Protocol):
    """A `@jit` function: launched as `kernel[grid](...)`, or called from another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    # Any: a kernel body deals in triton values, which have no static types.
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


jit: Callable[[Callable[..., Any]], Kernel] = triton.jit


@jit
def _probe() -> None:
    pass


# The interpreter holds its grid position and patches `triton.language` in module globals: one launch at a time.
_INTERPRETER_LOCK = threading.Lock()


def is_interpreted() -> bool:
    """True when kernels run on the CPU: decided when this module was imported, whatever the environment says now."""
    return not isinstance(_probe, triton.runtime.JITFunction)


def nvidia_arch() -> int:
    """80, 90, 100 and so on for the current NVIDIA GPU; 0 for another maker's, and under the interpreter."""
    if is_interpreted():
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def all_registers() -> dict[str, int]:
    """An option for a launch of up to 8 warps that needs its registers more than it needs more warps at a time.

    Left alone, ptxas trades them, and spills 8 to 24 bytes for it. It also takes twice as many as would do when the
    limit is set.
    """
    return {"maxnreg": 255} if nvidia_arch() else {}


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where there is none, so that loops over tiles have something to loop over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def launch(kernel: Kernel, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch on `device`'s current stream; an empty grid is no launch."""
    if 0 in grid:
        return
    with _launch_scope(device):
        kernel[grid](*args, **({"enable_fp_fusion": True} | meta))


def require_runnable() -> None:
    """Raise RuntimeError, saying what to do, when kernels could not run in this process."""
    if is_interpreted() or torch.cuda.is_available():
        return
    raise RuntimeError(
        "triton kernels need a GPU, and torch sees none. Use the cpu attention backend, or set TRITON_INTERPRET=1 "
        "before the process starts to run the kernels slowly on the CPU"
    )


def _launch_scope(device: torch.device) -> AbstractContextManager[Any]:
    if is_interpreted():
        return _INTERPRETER_LOCK
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
