"""What the sessions of both sides share: their settings, and the ways between the event loop and other threads."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc
import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.sharded import KVShards
from common.tls.identity import Component, Identity
from common.values.errors import PeerError
from common.values.ids import WorkerRef
from common.values.ranks import WHOLE, Rank
from common.values.request import Fingerprint
from kvtransfer.chunk.aead import AeadKind
from kvtransfer.chunk.staging import StagingPool
from kvtransfer.links.build import LinkPlan, build_link
from kvtransfer.links.protocol import Link

EventT = TypeVar("EventT")
# Control messages waiting for one peer. A peer that does not read this many is cut off.
MAX_QUEUED_MESSAGES = 10_000
STOPPING = "this worker stops"


@dataclass(frozen=True, slots=True, eq=False)
class SessionSettings:
    """What a worker's sessions need to know of it. `host` is where it listens and what it advertises."""

    ref: WorkerRef
    fingerprint: Fingerprint
    cache: KVCache | KVShards
    rank: Rank = WHOLE  # of the process that these sessions are of
    host: str = "127.0.0.1"
    transport: str = "gloo"
    digest: bool = True
    max_inflight_bytes: int = 32 << 20
    link_timeout_s: float = 30.0
    identity: Identity = field(default_factory=lambda: Identity(Component.PREFILL, "pdserve"))

    @property
    def aead_kind(self) -> AeadKind:
        """What both sides of a pair must agree on. Memory on a device is not encrypted."""
        is_encrypted = self.digest and self.staging_device.type == "cpu"
        return AeadKind.AES_GCM if is_encrypted else AeadKind.NONE

    def aead_kind_on(self, transport: str) -> AeadKind:
        """Memory that the kernel gives to these two processes alone needs no encryption."""
        return AeadKind.NONE if transport == "shm" else self.aead_kind

    @property
    def staging_device(self) -> torch.device:
        """NCCL moves device memory; the others need the CPU's."""
        return self.cache.device if self.transport == "nccl" else torch.device("cpu")

    def new_staging_pool(self) -> StagingPool:
        is_pinned = self.cache.device.type == "cuda" and self.staging_device.type == "cpu"
        return StagingPool(self.max_inflight_bytes, self.staging_device, is_pinned=is_pinned)


class SessionEnded(PeerError):
    """A session ends for the reason in the message."""


class ThreadsafePost(Generic[EventT]):
    """Carries events from any thread into the loop's, until it is closed: afterwards they are dropped.

    One per session, closed just before PeerLost is posted: no event of a lost peer follows it.
    """

    def __init__(self, post: Callable[[EventT], None]) -> None:
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._is_open = True

    def __call__(self, event: EventT) -> None:
        call_in_loop(self._loop, self._deliver, event)

    def close(self) -> None:
        """Only from the loop's thread."""
        self._is_open = False

    def _deliver(self, event: EventT) -> None:
        if self._is_open:
            self._post(event)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> bool:
    """`loop.call_soon_threadsafe`; False when the loop is closed: the call is dropped."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


async def build_link_off_loop(plan: LinkPlan) -> Link:
    """Build in a thread of its own: an absent peer blocks the constructor for the whole timeout.

    When the caller is cancelled meanwhile, the link is closed as soon as it stands.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Link] = loop.create_future()

    def run() -> None:
        try:
            link = build_link(plan)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            call_in_loop(loop, fail, reason)
        else:
            if not call_in_loop(loop, deliver, link):
                link.close()

    def fail(reason: str) -> None:
        if not future.done():
            future.set_exception(SessionEnded(f"link not built: {reason}"))

    def deliver(link: Link) -> None:
        if future.done():
            link.close()
        else:
            future.set_result(link)

    threading.Thread(target=run, name="link-build", daemon=True).start()
    return await future


def describe_end(result: object) -> str:
    """Why a connection's task ended, in one line."""
    match result:
        case grpc.aio.AioRpcError():
            return f"{result.code().name}: {result.details()}"
        case TimeoutError():
            return "handshake timed out"
        case BaseException():
            return str(result) or type(result).__name__
        case _:
            return "the peer closed the control stream"


def raise_if_bug(result: object) -> None:
    """Re-raise what is neither the peer's nor the network's doing."""
    ordinary = (asyncio.CancelledError, grpc.RpcError, grpc.aio.BaseError, PeerError, TimeoutError, ValueError)
    if isinstance(result, BaseException) and not isinstance(result, ordinary):
        raise result


def link_prefix(sender: WorkerRef, receiver: WorkerRef, epoch: str) -> str:
    """Key prefix of one link in the store. Both incarnations and a fresh epoch: stale keys are never read."""
    return f"{sender}/{receiver}/{epoch}"
