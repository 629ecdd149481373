"""What all links share: a group of two processes, a waiting thread per direction, and their end."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvtransfer.links.protocol import Done, LinkClosed
from kvtransfer.links.waiter import Pending, Waiter

# torch.distributed has no public type for a process group of ours: Backend lacks send/recv in its stubs.
ProcessGroup = Any
Post = Callable[[ProcessGroup, torch.Tensor], Pending]
Interrupt = Callable[[ProcessGroup], None]
SendNow = Callable[[ProcessGroup, torch.Tensor], bool]


class ProcessGroupLink:
    """A `Link` over a process group that was built directly. `post_send`/`post_receive` start an operation.

    Operations start in the caller's thread; several are in flight. The group is destroyed when both waiters have
    ended: a blocked operation ends by `interrupt`, or when the peer ends its side, dies, or the timeout is over.
    `interrupt` returns at once; `abort`, which may block, has a thread of its own.

    `send_now` does a send at once if it need not wait, and tells: where a send is a copy, a second thread would only
    take the interpreter's lock from the first.
    """

    def __init__(
        self,
        group: ProcessGroup,
        post_send: Post,
        post_receive: Post,
        name: str,
        interrupt: Interrupt = lambda _: None,
        send_now: SendNow = lambda *_: False,
        abort: Interrupt = lambda _: None,
    ) -> None:
        self._group = group
        self._interrupt = interrupt
        self._send_now = send_now
        self._abort = abort
        self._post_send = post_send
        self._post_receive = post_receive
        self._lock = threading.Lock()  # guards _group and _closed_reason
        self._closed_reason = ""
        self._sends = Waiter(f"{name}-send", self._fail)
        self._receives = Waiter(f"{name}-receive", self._fail)
        self._gone = threading.Event()

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        self._start(self._post_send, self._sends, buffer, done, self._send_now)

    def receive(self, buffer: torch.Tensor, done: Done) -> None:
        self._start(self._post_receive, self._receives, buffer, done)

    def close(self) -> None:
        with self._lock:
            is_first = self._group is not None
            group, self._group = self._group, None
            self._closed_reason = self._closed_reason or "closed here"
        if is_first:
            self._interrupt(group)
            threading.Thread(target=self._destroy, args=([group],), name="link-end", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        return self._gone.wait(timeout_s)

    def _start(
        self, post: Post, waiter: Waiter, buffer: torch.Tensor, done: Done, do_now: SendNow = lambda *_: False
    ) -> None:
        try:
            with self._lock:
                if self._closed_reason:
                    raise LinkClosed(self._closed_reason)
                is_done = waiter.is_idle and do_now(self._group, buffer)
                if not is_done:
                    waiter.add(post(self._group, buffer), buffer, done)
        except LinkClosed as error:
            done(error)
        except RuntimeError as error:
            self._fail(str(error).partition("\n")[0])
            done(LinkClosed(self._closed_reason))
        else:
            if is_done:
                done(None)

    def _fail(self, reason: str) -> None:
        """Nothing new starts; what is pending fails by itself, because the pair is broken."""
        with self._lock:
            self._closed_reason = self._closed_reason or reason

    def _destroy(self, group_box: list[ProcessGroup]) -> None:
        """`group_box` holds the last reference: popping it closes the group's sockets and joins its threads."""
        self._abort(group_box[0])
        for waiter in (self._sends, self._receives):
            waiter.close()
        for waiter in (self._sends, self._receives):
            waiter.join()
        group_box.clear()
        self._gone.set()
