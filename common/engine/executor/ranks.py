"""The other ranks of a worker, a process each on this machine, and the runner that drives them all.

Rank 0's process holds the worker's core and samples. A step goes to every other rank first, then rank 0 computes its
own part; within the step ranks meet in `Collectives`, and at its end each answers. No process outlives rank 0's: the
socket that it beats on closes. A rank that ends or stands still takes the worker with it: what it held is lost.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from common.checkpoint import CheckpointError
from common.engine.contract.collectives import RankLost
from common.engine.contract.executor import LayerHook, Runner
from common.engine.contract.plan import StepPlan, StepResult
from common.engine.executor.collectives import SharedCollectives, connect_all, shared_bytes
from common.engine.executor.one_behind import OneBehind
from common.engine.executor.rank_channel import Begin, Channel, NewCache, encode, encode_step
from common.engine.kv.shared import map_shared_memory, new_shared_memory
from common.telemetry.logs import get_logger
from common.values.config import WorkerConfig
from common.values.ranks import Rank

# Finds what this process would find, wherever it was started.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from common.engine.rank_process import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
BEATS_PER_LEASE = 4
# As `common.worker.watchdog.LEASES`: a busy machine may keep a process waiting, and a new worker costs all that runs.
SILENT_LEASES = 2.0
OnLost = Callable[[RankLost], None]


class _Other:
    """Another rank's process, as rank 0 sees it."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", channel: Channel, beats: socket.socket) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.beats = beats
        self.heard_s = time.monotonic()

    def expect(self, doing: str) -> None:
        """Wait for its answer. Raises RankLost; CheckpointError with what it says went wrong."""
        answer = self.channel.receive()
        if answer is None:
            raise RankLost(f"rank {self.rank} (process {self.process.pid}) ended while {doing}")
        if text := answer[0].decode():
            raise CheckpointError(f"rank {self.rank}: {text}")


class RankProcesses:
    """Ranks 1 and up of a worker. `close` it. Calls from one thread at a time, `on_lost` and `close` from any."""

    def __init__(self, config: WorkerConfig, slot_bytes: int) -> None:
        """They begin to load at once. `slot_bytes`: as of `shared_bytes`."""
        world_size = config.tensor_parallel_size
        memory_fd = new_shared_memory(shared_bytes(world_size, slot_bytes))
        peers = connect_all(world_size)
        self.collectives = SharedCollectives(Rank(0, world_size), map_shared_memory(memory_fd), peers[0])
        self._lock = threading.Lock()  # guards _lost and _listeners
        self._lost: RankLost | None = None
        self._listeners: list[OnLost] = []
        self._is_closed = False
        self._silence_limit_s = SILENT_LEASES * config.lease_s
        self._is_serving = False  # while it loads, a rank may be silent for as long as a large tensor takes
        self._others = [_start(rank) for rank in range(1, world_size)]
        for other in self._others:
            ends = peers[other.rank]
            begin = Begin(config.model_dump_json(), other.rank, world_size, tuple(ends))
            other.channel.send(encode(begin), [memory_fd, *(end.fileno() for end in ends.values())])
        _close_all(peers[1:], memory_fd)
        threading.Thread(
            target=self._watch, args=(config.lease_s / BEATS_PER_LEASE,), name="ranks", daemon=True
        ).start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(other.process.pid for other in self._others)

    @property
    def silent_s(self) -> tuple[float, ...]:
        """For how long nothing was heard of each."""
        now_s = time.monotonic()
        return tuple(max(0.0, now_s - other.heard_s) for other in self._others)

    def wait_until_loaded(self) -> None:
        """Raises CheckpointError, RankLost."""
        self._expect("loading")
        self._is_serving = True

    def use_caches(self, block_size: int, num_blocks: tuple[int, ...], fds: Sequence[int]) -> None:
        """Give every other rank, in their order, an empty cache in its own memory."""
        for other, fd in zip(self._others, fds, strict=True):
            other.channel.send(encode(NewCache(block_size, num_blocks)), [fd])
        self._expect("taking a cache")

    def start_step(self, plan: StepPlan) -> None:
        data = encode_step(plan)
        for other in self._others:
            other.channel.send(data)

    def finish_step(self) -> None:
        """Returns when every other rank has done all of the step."""
        self._expect("computing")

    def on_lost(self, listener: OnLost) -> Callable[[], None]:
        """Tell the listener once, from any thread, when a rank is lost, at once if one is; returns what ends it."""
        with self._lock:
            self._listeners.append(listener)
            lost = self._lost
        if lost is not None:
            listener(lost)
        return lambda: self._listeners.remove(listener)

    def lose(self, error: RankLost) -> None:
        """Give all ranks up: whoever waits for one of them finds it gone."""
        with self._lock:
            if self._lost is not None or self._is_closed:
                return
            self._lost = error
            listeners = list(self._listeners)
        get_logger().error("rank_lost", reason=str(error))
        self._end_processes()
        for listener in listeners:
            listener(error)

    def close(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._end_processes()

    def _end_processes(self) -> None:
        for other in self._others:
            other.process.kill()
        for other in self._others:
            other.process.wait()

    def _expect(self, doing: str) -> None:
        if self._lost is not None:
            raise self._lost
        for other in self._others:
            other.expect(doing)

    def _watch(self, interval_s: float) -> None:
        """Hear every rank's beats; until one is lost or all are closed."""
        with selectors.DefaultSelector() as selector:
            for other in self._others:
                selector.register(other.beats, selectors.EVENT_READ, other)
            while self._lost is None and not self._is_closed:
                for key, _ in selector.select(interval_s):
                    self._hear(key.data)
                self._check_silence()

    def _hear(self, other: _Other) -> None:
        with contextlib.suppress(OSError):  # reset: it has ended
            if other.beats.recv(64):
                other.heard_s = time.monotonic()
                return
        self.lose(RankLost(f"rank {other.rank} (process {other.process.pid}) has ended"))

    def _check_silence(self) -> None:
        now_s = time.monotonic()
        for other in self._others:
            if not self._is_serving:
                other.heard_s = now_s
            elif now_s - other.heard_s > self._silence_limit_s:
                self.lose(RankLost(f"rank {other.rank} (process {other.process.pid}) stands still"))


class RankedRunner:
    """`Runner` of a whole worker: rank 0's own, and through `others` those of all other ranks.

    A step that raises leaves the ranks at different places, so the worker is over: they are given up.
    """

    def __init__(self, own: Runner, others: RankProcesses) -> None:
        self.rank = own.rank
        self._own = own
        self._others = others

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        """As `Runner.run`; layers are reported when every rank has written them. Raises RankLost."""
        hook = OneBehind(layer_hook) if layer_hook is not None else None
        try:
            self._others.start_step(plan)
            result = self._own.run(plan, hook)
            self._others.finish_step()
        except Exception as error:
            lost = error if isinstance(error, RankLost) else RankLost(f"a step failed: {type(error).__name__}")
            self._others.lose(lost)
            raise lost from error
        if hook is not None:
            hook.end()
        return result


def _start(rank: int) -> _Other:
    """A process that waits for `Begin`. It inherits environment and output; nothing else is left open in it."""
    (channel, its_channel), (beats, its_beats) = socket.socketpair(), socket.socketpair()
    fds = its_channel.fileno(), its_beats.fileno()
    with its_channel, its_beats:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
        )
    return _Other(rank, process, Channel(channel), beats)


def _close_all(peers: Sequence[dict[int, socket.socket]], memory_fd: int) -> None:
    """What the other processes have now."""
    os.close(memory_fd)
    for ends in peers:
        for end in ends.values():
            end.close()
