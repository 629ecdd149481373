"""What a rank other than 0 runs: load its part of the model, then whatever rank 0 says. Started by `executor.ranks`.

It ends when rank 0's process does, whatever it is doing: the socket that it beats on closes. Signals that ask a worker
to drain or end are rank 0's to answer.
"""

import os
import select
import signal
import socket
import threading
import traceback

from common.checkpoint import CheckpointError
from common.engine.contract.collectives import RankLost
from common.engine.executor.collectives import SharedCollectives
from common.engine.executor.processors import pin_this_thread, processors
from common.engine.executor.rank_channel import Begin, Channel, NewCache, Step, decode
from common.engine.executor.ranks import BEATS_PER_LEASE
from common.engine.executor.runner import ModelRunner
from common.engine.kv.shared import map_shared_memory
from common.engine.loading import RankPart, load_part
from common.telemetry.logs import configure_logs, get_logger
from common.values.config import WorkerConfig
from common.values.ranks import Rank


def main(control_fd: int, beats_fd: int) -> None:
    """Serve until rank 0 ends. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = 0
    try:
        _serve(Channel(socket.socket(fileno=control_fd)), socket.socket(fileno=beats_fd))
    except RankLost:
        code = 1  # the one that is gone says why
    except BaseException as error:
        # The type alone: a message of torch's may hold tensor contents.
        get_logger().error("rank_failed", error=type(error).__name__, at=_where(error))
        code = 1
    os._exit(code)  # not a normal exit: no thread of a library is waited for


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))


def _serve(channel: Channel, beats: socket.socket) -> None:
    first = channel.receive()
    if first is None:
        return
    begin = decode(first[0])
    assert isinstance(begin, Begin)
    config = WorkerConfig.model_validate_json(begin.config_json)
    configure_logs(f"{config.worker_id}/{begin.rank}")
    threading.Thread(target=_beat, args=(beats, config.lease_s / BEATS_PER_LEASE), name="beats", daemon=True).start()
    pin_this_thread(processors(config.cpus))
    part = _load(channel, config, begin, first[1])
    get_logger().info("rank_ready", worker_id=config.worker_id, rank=begin.rank, pid=os.getpid())
    _compute(channel, part)


def _load(channel: Channel, config: WorkerConfig, begin: Begin, fds: list[int]) -> RankPart:
    memory_fd, *peer_fds = fds
    peers = {peer: socket.socket(fileno=fd) for peer, fd in zip(begin.peers, peer_fds, strict=True)}
    collectives = SharedCollectives(Rank(begin.rank, begin.world_size), map_shared_memory(memory_fd), peers)
    os.close(memory_fd)
    try:
        part = load_part(config, collectives)
    except CheckpointError as error:
        channel.send(str(error).encode())
        raise
    channel.send(b"")
    return part


def _compute(channel: Channel, part: RankPart) -> None:
    """In the order of rank 0's messages; each is answered when it is done."""
    runner: ModelRunner | None = None
    while (received := channel.receive()) is not None:
        data, fds = received
        message = decode(data)
        if isinstance(message, NewCache):
            runner = None  # with the old cache
            runner = part.new_runner(message.block_size, message.num_blocks, map_shared_memory(fds[0]))
            os.close(fds[0])
        else:
            assert isinstance(message, Step), f"a second {type(message).__name__}"
            assert runner is not None, "a step before there is a cache"
            runner.run(message.plan())
        channel.send(b"")


def _beat(beats: socket.socket, interval_s: float) -> None:
    """Say that this process runs, and end it when rank 0 has: nothing is ever said on this socket to us."""
    try:
        while not select.select([beats], [], [], interval_s)[0]:
            beats.send(b"b")
    except OSError:
        pass
    os._exit(1)
