"""How fast a link is on this machine: both ends in this process, as two workers of one host would have them."""

import queue
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.values.errors import PeerError

_NUM_MESSAGES, _MESSAGE_BYTES = 48, 1 << 20
_TIMEOUT_S = 20.0


def measure(transport: str) -> float:
    """Bytes per second, not encrypted. Raises PeerError, OSError or RuntimeError when no link can be made."""
    receiver, sender = _pair(transport)
    try:
        import torch

        buffers = [torch.ones(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
        _ship(receiver, sender, buffers, 4)  # its memory is touched
        started_s = time.perf_counter()
        _ship(receiver, sender, buffers, _NUM_MESSAGES)
        return _NUM_MESSAGES * _MESSAGE_BYTES / (time.perf_counter() - started_s)
    finally:
        for end in (receiver, sender):
            end.close()


def _pair(transport: str) -> tuple[Any, Any]:
    import torch

    from kvtransfer.links.build import LinkPlan, build_link
    from kvtransfer.links.gloo import RECEIVER_END, SENDER_END
    from kvtransfer.links.meeting import MeetingPoint, meet
    from kvtransfer.links.rendezvous import RendezvousStore

    host, prefix, secret = "127.0.0.1", f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(16)
    store, point = (None, MeetingPoint()) if transport == "shm" else (RendezvousStore(host, _TIMEOUT_S), None)

    def build(end: int, meeting: Any) -> Any:
        address = (host, store.port if store is not None else 0)
        return build_link(
            LinkPlan(transport, *address, prefix, end, host, torch.device("cpu"), _TIMEOUT_S, secret, meeting=meeting)
        )

    try:
        with ThreadPoolExecutor(1) as executor:
            receiver = executor.submit(build, RECEIVER_END, point)
            sender = build(SENDER_END, meet(point.name, point.token, _TIMEOUT_S) if point is not None else None)
            return receiver.result(), sender
    finally:
        for each in (store, point):
            if each is not None:
                each.close()


def _ship(receiver: Any, sender: Any, buffers: list[Any], num_messages: int) -> None:
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for _ in range(num_messages):
        receiver.receive(buffers[0], ended.put)
    for _ in range(num_messages):
        sender.send(buffers[1], lambda _: None)
    for _ in range(num_messages):
        if (error := _outcome(ended)) is not None:
            raise error


def _outcome(ended: queue.SimpleQueue[Exception | None]) -> Exception | None:
    try:
        return ended.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        raise PeerError(f"a message did not arrive within {_TIMEOUT_S:g} s") from None
