"""Faults that only come from inside a process. Each runs there, in a thread of its own, and changes code that is live.

What happened is noted where the chaos run can read it, also when the process kills itself.
"""

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.inside.sitecustomize import FOLDER_VARIABLE

_hits: dict[str, int] = {}
_offset_name = "chaos_offset_s"


def hits(of: str) -> int:
    """How often a plant has acted in this process."""
    return _hits.get(of, 0)


def break_layer(at_call: int) -> None:
    """One exception in a layer of the model: in the call of that number from now."""
    from common.engine.devices.cpu.attention import CpuAttention

    real, calls = CpuAttention.attend, 0

    def attend(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            _hit("break_layer")
            raise RuntimeError("planted by the chaos run")
        return real(self, *arguments)

    _plant(CpuAttention, "attend", attend)


def spoil_row(at_least: int) -> None:
    """Once, in a step that samples for so many rows: the first of them is not finite."""
    from common.engine.executor import runner as imported

    runner: Any = imported
    real = runner.sample

    def sample(logits: Any, specs: Any, *arguments: Any) -> Any:
        if len(specs) >= at_least and not hits("spoil_row"):
            _hit("spoil_row")
            logits = logits.clone()
            logits[0] = float("nan")
        return real(logits, specs, *arguments)

    _plant(runner, "sample", sample)


def count_refused_allocations() -> None:
    """Of blocks, where there are too few."""
    from common.engine.kv.block_pool import BlockPool

    real = BlockPool.allocate

    def allocate(self: Any, *arguments: Any) -> Any:
        blocks = real(self, *arguments)
        if blocks is None:
            _hit("count_refused_allocations")
        return blocks

    _plant(BlockPool, "allocate", allocate)


def disorder_link(doubled: int, swapped: int) -> None:
    """Of the messages that this process sends on its links: so many go twice, then so many pairs change places."""
    from kvtransfer.links.process_group import ProcessGroupLink

    real = ProcessGroupLink.send
    held: dict[int, tuple[Any, Any]] = {}

    def send(self: Any, buffer: Any, done: Any) -> None:
        if hits("doubled") < doubled:
            _hit("doubled")
            real(self, buffer.clone(), lambda error: None)
            real(self, buffer, done)
        elif id(self) in held:
            _hit("swapped")
            real(self, buffer, done)
            real(self, *held.pop(id(self)))
        elif hits("swapped") < swapped:
            held[id(self)] = (buffer, done)  # for ever, if the link breaks first
        else:
            real(self, buffer, done)

    _plant(ProcessGroupLink, "send", send)


def die_when(moment: str) -> None:
    """SIGKILL this process in the midst of its work: at an event that no look from outside can catch."""
    from decode_worker.core import DecodeCore
    from kvtransfer.events import AcknowledgedByPeer, ChunkSent
    from kvtransfer.sender.core import SenderCore

    if moment == "admitting":
        received: Any = DecodeCore._on_transfer_received

        def on_received(self: Any, *arguments: Any) -> None:
            received(self, *arguments)
            _die(moment)

        _plant(DecodeCore, "_on_transfer_received", on_received)
        return
    fatal = {"acknowledged": AcknowledgedByPeer, "sending": ChunkSent}[moment]
    handle = SenderCore.handle

    def handle_or_die(self: Any, event: Any, now_s: float) -> Any:
        if isinstance(event, fatal):
            _die(moment)
        return handle(self, event, now_s)

    _plant(SenderCore, "handle", handle_or_die)


def shift_clock(seconds: int) -> float:
    """Move the wall clock of this process; returns what it shows now."""
    ctypes.c_long.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), _offset_name).value = seconds
    return time.time()


def kill_actor(worker_id: str, num_calls: int) -> list[str]:
    """Of `pdserve up`: kill a worker's actor through Ray while calls of it are queued; returns how each call ended."""
    import ray

    pools_class: Any = sys.modules["deploy.ray.pools"].RayPools
    (pools,) = [each for each in gc.get_objects() if isinstance(each, pools_class)]
    handle = pools._lives[worker_id].handle
    calls = [handle.wait.remote(60.0) for _ in range(num_calls)]
    ray.kill(handle, no_restart=True)
    return [_end_of(call) for call in calls]


def _end_of(call: Any) -> str:
    import ray

    try:
        return repr(ray.get(call, timeout=30))
    except Exception as error:
        return type(error).__name__


def _plant(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    setattr(owner, name, replacement)


def _hit(of: str) -> None:
    _hits[of] = _hits.get(of, 0) + 1


def _die(moment: str) -> None:
    (Path(os.environ[FOLDER_VARIABLE]) / f"{os.getpid()}.died").write_text(moment)
    os.kill(os.getpid(), signal.SIGKILL)
