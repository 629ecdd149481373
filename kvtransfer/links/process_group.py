"""What the gloo and the NCCL link share: a 2-rank process group, a waiting thread per direction, and their end."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvtransfer.links.protocol import Done, LinkClosed
from kvtransfer.links.waiter import Pending, Waiter

# torch.distributed has no public type for a process group of ours: Backend lacks send/recv in its stubs.
ProcessGroup = Any
Post = Callable[[ProcessGroup, torch.Tensor], Pending]


class ProcessGroupLink:
    """A `Link` over a process group that was built directly. `post_send`/`post_receive` start an operation.

    Operations start in the caller's thread; several are in flight. The group is destroyed when both waiters have
    ended: a blocked operation ends when the peer ends its side, dies, or the group's timeout is over.
    """

    def __init__(self, group: ProcessGroup, post_send: Post, post_receive: Post, name: str) -> None:
        self._group = group
        self._post_send = post_send
        self._post_receive = post_receive
        self._lock = threading.Lock()  # guards _group and _closed_reason
        self._closed_reason = ""
        self._sends = Waiter(f"{name}-send", self._fail)
        self._receives = Waiter(f"{name}-receive", self._fail)
        self._gone = threading.Event()

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        self._start(self._post_send, self._sends, buffer, done)

    def receive(self, buffer: torch.Tensor, done: Done) -> None:
        self._start(self._post_receive, self._receives, buffer, done)

    def close(self) -> None:
        with self._lock:
            is_first = self._group is not None
            group, self._group = self._group, None
            self._closed_reason = self._closed_reason or "closed here"
        if is_first:
            threading.Thread(target=self._destroy, args=([group],), name="link-end", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        return self._gone.wait(timeout_s)

    def _start(self, post: Post, waiter: Waiter, buffer: torch.Tensor, done: Done) -> None:
        try:
            with self._lock:
                if self._closed_reason:
                    raise LinkClosed(self._closed_reason)
                waiter.add(post(self._group, buffer), buffer, done)
        except LinkClosed as error:
            done(error)
        except RuntimeError as error:
            self._fail(str(error).partition("\n")[0])
            done(LinkClosed(self._closed_reason))

    def _fail(self, reason: str) -> None:
        """Nothing new starts; what is pending fails by itself, because the pair is broken."""
        with self._lock:
            self._closed_reason = self._closed_reason or reason

    def _destroy(self, group_box: list[ProcessGroup]) -> None:
        """`group_box` holds the last reference: popping it closes the group's sockets and joins its threads."""
        for waiter in (self._sends, self._receives):
            waiter.close()
        for waiter in (self._sends, self._receives):
            waiter.join()
        group_box.clear()
        self._gone.set()
