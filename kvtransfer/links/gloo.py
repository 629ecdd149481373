"""A link over gloo: TCP between CPUs. Built directly, without init_process_group: workers come and go.

Facts it is built on (torch 2.13): a send completes when the peer posts the matching receive; SIGKILL of the peer
wakes both directions; an operation that times out closes the pair for both sides, so the group's timeout is the
backstop that frees a stuck pair, not a deadline; a build blocks until both ends are there. Several operations are
in flight: blocking sends of 384 KiB one at a time reach less than half of the bandwidth. A device listens as long as it
lives and keeps every silent connection, so each link has one of its own, closed to newcomers once it stands, and to all
but the peer before.
"""

import socket
import threading
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from kvtransfer.links.gate import Gate
from kvtransfer.links.ports import close_to_newcomers, listeners
from kvtransfer.links.process_group import ProcessGroup, ProcessGroupLink
from kvtransfer.links.waiter import Pending

RECEIVER_END, SENDER_END = 0, 1  # ranks of the link's own process group
_TAG = 0  # NCCL ignores tags: order alone decides
_gloo: Any = c10d.ProcessGroupGloo  # its stub lacks the options that name the address
_MAX_DEVICES = 10
_one_at_a_time = threading.Lock()


def build_gloo_link(
    store: c10d.Store, notes: c10d.Store, end: int, host: str, timeout_s: float, name: str
) -> ProcessGroupLink:
    """Blocks until the peer builds its end, at most `timeout_s`; raises RuntimeError when it does not.

    `host` is the address of this end: gloo listens there and nowhere else. `store` and `notes`: one place by two
    clients, since one that waits holds up whoever else uses it; nobody but the two ends may be able to write there.
    """
    options = _gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    device, listener, gate = _guarded_device(host)
    options._devices = [device]
    options._threads = 1
    with listener:
        with gate.letting_in(notes, end, timeout_s):
            group = _gloo(store, end, 2, options)
        close_to_newcomers(listener)
    other_end = 1 - end

    def post_send(group: ProcessGroup, buffer: torch.Tensor) -> Pending:
        work: Pending = group.send([buffer], other_end, _TAG)
        return work

    def post_receive(group: ProcessGroup, buffer: torch.Tensor) -> Pending:
        work: Pending = group.recv([buffer], other_end, _TAG)
        return work

    return ProcessGroupLink(group, post_send, post_receive, name)


def _guarded_device(host: str) -> tuple[Any, socket.socket, Gate]:
    """Another one when somebody was there before its gate: a moment, which he must meet again and again."""
    for _ in range(_MAX_DEVICES):
        device, listener = _new_device(host)
        gate = Gate(listener)
        if not gate.was_passed():
            return device, listener, gate
        listener.close()
    raise RuntimeError("strangers are at each port that gloo listens on before it can be guarded")


def _new_device(host: str) -> tuple[Any, socket.socket]:
    """A device and a duplicate of its listening socket: the one that was not there before."""
    with _one_at_a_time:
        before = listeners()
        device = _gloo.create_device(hostname=host, lazy_init=False)
        after = listeners()
    for port, listener in (*before.items(), *after.items()):
        if port in before:
            listener.close()
    return device, next(listener for port, listener in after.items() if port not in before)
