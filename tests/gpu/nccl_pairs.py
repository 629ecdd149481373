"""NCCL links between processes with a GPU each: order, a peer that is killed, and the next link after it.

`python -m tests.gpu.nccl_pairs`: needs two GPUs or more, and says so where there are fewer.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from common.values.config import WorkerSettings
from deploy.worker.env import worker_environment
from kvtransfer.links.build import LinkPlan, build_link
from kvtransfer.links.gloo import RECEIVER_END, SENDER_END
from kvtransfer.links.nccl import NcclPair
from kvtransfer.links.rendezvous import RendezvousStore
from tests.gpu.report import Report, error_of
from tests.kvtransfer.links.link_tools import HOST, new_prefix, receive, send

SECRET = b"of both ends"
TIMEOUT_S = 60.0  # guards against hanging; a busy machine takes its time to start the peer
NUM_BYTES = 1 << 20
_CHILD = "from tests.gpu.nccl_pairs import sending_end; sending_end(*__import__('sys').argv[1:])"


def check_nccl_pairs(report: Report) -> None:
    if torch.cuda.device_count() < 2:
        print("not run: NCCL between two GPUs (there are fewer)", flush=True)
        return
    for check in (carry_in_order, outlive_a_killed_peer):
        report.check(check.__name__, error_of(check))


def check_nccl_api() -> None:
    """In one process: the group can be made, aborted and dropped, and the GPU has a name to compare."""
    nccl: Any = c10d.ProcessGroupNCCL  # absent from CPU builds
    options = nccl.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    group = nccl(c10d.HashStore(), 0, 1, options)
    pair = NcclPair(group, RECEIVER_END, torch.device(torch.cuda.current_device()), TIMEOUT_S, torch.cuda)
    pair.abort()
    assert str(torch.cuda.get_device_properties(0).uuid)


def plan_of(port: int, prefix: str, end: int, device: torch.device, transport: str = "nccl") -> LinkPlan:
    return LinkPlan(transport, HOST, port, prefix, end, HOST, device, TIMEOUT_S, SECRET)


def start_peer(port: int, prefix: str, num_messages: int, transport: str = "nccl") -> "subprocess.Popen[bytes]":
    """A process on the second GPU that sends so many messages, then stands there."""
    environment = os.environ | worker_environment(WorkerSettings(), has_gpu=True)
    environment["CUDA_VISIBLE_DEVICES"] = "1" if transport == "nccl" else ""
    command = [sys.executable, "-c", _CHILD, str(port), prefix, str(num_messages), transport]
    return subprocess.Popen(command, env=environment)


def sending_end(port: str, prefix: str, num_messages: str, transport: str) -> None:
    """The child."""
    device = torch.device("cuda" if transport == "nccl" else "cpu")
    link = build_link(plan_of(int(port), prefix, SENDER_END, device, transport))
    for value in range(int(num_messages)):
        send(link, torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=device)).result(TIMEOUT_S)
    time.sleep(10 * TIMEOUT_S)


def carry_in_order(transport: str = "nccl", num_messages: int = 8) -> None:
    store, prefix = RendezvousStore(HOST, TIMEOUT_S), new_prefix()
    device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
    peer = start_peer(store.port, prefix, num_messages, transport)
    try:
        link = build_link(plan_of(store.port, prefix, RECEIVER_END, device, transport))
        buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device) for _ in range(num_messages)]
        for value, (future, buffer) in enumerate([(receive(link, each), each) for each in buffers]):
            future.result(TIMEOUT_S)
            assert bool((buffer == value).all()), f"message {value}"
        link.close()
        assert link.join(TIMEOUT_S)
    finally:
        peer.kill()
        peer.wait()
        store.close()


def outlive_a_killed_peer(transport: str = "nccl") -> None:
    """Receives that wait for it end, the link is freed, and a new pair on the same GPU works."""
    store, prefix = RendezvousStore(HOST, TIMEOUT_S), new_prefix()
    device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
    peer = start_peer(store.port, prefix, 1, transport)
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    try:
        link = build_link(plan_of(store.port, prefix, RECEIVER_END, device, transport))
        for _ in range(3):
            link.receive(torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device), ended.put)
        assert ended.get(timeout=TIMEOUT_S) is None
        peer.kill()
        peer.wait()
        link.close()
        assert all(ended.get(timeout=2 * TIMEOUT_S) is not None for _ in range(2))
        assert link.join(2 * TIMEOUT_S), "the link is not freed"
    finally:
        peer.kill()
        peer.wait()
        store.close()
    carry_in_order(transport)


if __name__ == "__main__":
    report = Report()
    check_nccl_pairs(report)
    print(f"{report.num_checks} checks, {len(report.failures)} failed")
    raise SystemExit(bool(report.failures))
