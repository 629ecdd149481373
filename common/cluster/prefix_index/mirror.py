"""A router's own copy of the index, which answers without asking. Redis stays the truth, the copy a hint of a hint.

    a worker's batches -> Redis -> the news of all workers   -> applied to a copy, while the numbers follow one another
    a worker without a copy     -> its whole set, once asked for -> the copy

One connection brings both, so what changed after a set was read arrives after it. A gap, a lost connection, a message
that cannot be true or a long silence drops copies; for a worker without a copy Redis is asked, as if there were no
mirror.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from common.cluster.keys import MEMBER_BYTES, Keys
from common.cluster.prefix_index.reader import RedisIndexReader
from common.cluster.redis import REDIS_ERRORS, connect
from common.cluster.scripts import COPY
from common.telemetry.logs import get_logger
from common.values.ids import BlockHash, WorkerRef

TIMEOUT_S = 0.5
# A connection this long without a word is asked for one; after as long again it is given up.
PING_INTERVAL_S = 2.0
RECONNECT_S = 0.5
# How long a worker may go without a look-up before its copy is dropped, and between two requests for one.
FORGET_S = 60.0
ASK_AGAIN_S = 1.0
# 4 MB in one message: half of what Redis keeps for a listener before it cuts it off. Larger sets are not mirrored.
MAX_MEMBERS = 1 << 18
# Members of a copy unpacked at a time, half a millisecond: requests are answered in between.
MAX_UNPACKED = 2048
# Workers say every third of their lease that they live. What is this long without a word may have missed a change.
SILENCE_S = 15.0
_STARTED_OVER = -1


@dataclass(slots=True)
class _Copy:
    """A worker's set as of the batch with this number."""

    sequence: int
    members: set[bytes]
    heard_s: float


@dataclass(slots=True)
class MirrorCounts:
    """What happened, since the start."""

    num_copies: int = 0
    num_gaps: int = 0
    num_invalid: int = 0
    num_silent: int = 0
    num_connections: int = 0


@dataclass(slots=True)
class _State:
    copies: dict[WorkerRef, _Copy] = field(default_factory=dict)
    asked_s: dict[WorkerRef, float] = field(default_factory=dict)
    used: set[WorkerRef] = field(default_factory=set)  # since the last sweep
    swept_s: float = 0.0
    checked_s: float = 0.0


class MirroredIndexReader:
    """A `PrefixIndexReader`. `start` it in the running loop and close it; owns `reader`."""

    def __init__(
        self, reader: RedisIndexReader, redis_url: str, namespace: str, on_silent: Callable[[], None] = lambda: None
    ) -> None:
        self.counts = MirrorCounts()
        self._on_silent = on_silent
        self._reader = reader
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=4)
        self._copy = self._redis.register_script(COPY)
        self._keys = Keys(namespace)
        self._channel = self._keys.copies(secrets.token_hex(8))
        self._state = _State()
        self._is_connected = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="index mirror")

    async def close(self) -> None:
        self._is_closing = True
        while self._task is not None and not self._task.done():
            self._task.cancel()  # a subscription of redis-py may swallow one (Python 3.11): again until it ends
            await asyncio.wait({self._task}, timeout=0.05)
        await self._redis.aclose()
        await self._reader.close()

    def known_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int] | None:
        """Leading blocks of `hashes` per worker, those with at least one; None when a worker has no copy here."""
        state = self._state
        state.used.update(workers)
        copies = [state.copies.get(ref) for ref in workers]
        depths = {ref: _depth(hashes, copy.members) for ref, copy in zip(workers, copies, strict=True) if copy}
        if len(depths) < len(workers):
            return None
        return {ref: depth for ref, depth in depths.items() if depth}

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """From the copies, or from Redis; then copies are asked for."""
        known = self.known_prefix(hashes, workers)
        if known is not None:
            return known
        found = await self._reader.longest_prefix(hashes, workers)
        await self._ask_for_copies(workers)
        return found

    async def _ask_for_copies(self, workers: Sequence[WorkerRef]) -> None:
        state, now_s = self._state, time.monotonic()
        for ref in workers:
            is_due = now_s >= state.asked_s.get(ref, float("-inf")) + ASK_AGAIN_S
            if self._is_connected and ref not in state.copies and is_due:
                state.asked_s[ref] = now_s
                await self._ask_for_copy(ref)

    async def _ask_for_copy(self, ref: WorkerRef) -> None:
        keys = self._keys
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._copy(
                    keys=[keys.lease(ref), keys.members(ref), keys.sequence(ref)],
                    args=[self._channel, str(ref), MAX_MEMBERS],
                )
        except REDIS_ERRORS:
            pass  # the look-ups themselves count what Redis does not answer

    # ---- what Redis tells ---------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                await self._follow()
            except Exception as error:  # whatever it was, copies that nobody keeps up to date must go
                self._forget_all()
                if not isinstance(error, REDIS_ERRORS):
                    get_logger().error("index_mirror_failed", error_type=type(error).__name__)
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self) -> None:
        """Until the connection breaks or says nothing. Raises what ended it."""
        async with self._redis.pubsub() as listener:
            await listener.subscribe(self._keys.news, self._channel)
            is_pinged = False
            while not self._is_closing:
                message = await listener.get_message(timeout=PING_INTERVAL_S)
                if message is not None:
                    await self._on_message(message)
                elif is_pinged:
                    raise RedisConnectionError("the index's channel is silent")
                else:
                    await listener.ping()
                is_pinged = message is None
                self._forget_silent()
                self._forget_unused()

    async def _on_message(self, message: dict[str, Any]) -> None:
        is_mine = message["channel"] == self._channel.encode()
        if message["type"] == "subscribe" and is_mine:  # again if redis-py connects anew: what came between is lost
            self._forget_all()
            self._is_connected = True
            self.counts.num_connections += 1
        elif message["type"] == "message":
            try:
                await self._on_change(message["data"], is_copy=is_mine)
            except ValueError:  # nobody of ours wrote that
                self.counts.num_invalid += 1
                self._state.copies.clear()

    async def _on_change(self, data: bytes, *, is_copy: bool) -> None:
        head, _, body = data.partition(b"\n")
        before, after, num_added, ref_text = head.split(b" ", 3)
        ref, cut = WorkerRef.parse(ref_text.decode()), int(num_added)
        if is_copy:
            if ref not in self._state.asked_s or len(body) > MAX_MEMBERS * MEMBER_BYTES:
                return  # nobody of ours sends that, and it must not fill our memory
            self._state.copies[ref] = _Copy(int(after), await _unpacked(body), time.monotonic())
            self.counts.num_copies += 1
        elif (copy := self._state.copies.get(ref)) is not None:
            self._apply(ref, copy, int(before), int(after), _members(body[:cut]), _members(body[cut:]))

    def _apply(
        self, ref: WorkerRef, copy: _Copy, before: int, after: int, added: list[bytes], removed: list[bytes]
    ) -> None:
        if before == _STARTED_OVER:
            copy.members.clear()
        elif before != copy.sequence or len(copy.members) + len(added) > MAX_MEMBERS:
            self.counts.num_gaps += 1
            del self._state.copies[ref]
            return
        copy.sequence, copy.heard_s = after, time.monotonic()
        copy.members.update(added)
        copy.members.difference_update(removed)

    def _forget_all(self) -> None:
        self._state = _State(swept_s=time.monotonic())
        self._is_connected = False

    def _forget_silent(self) -> None:
        """Of workers that say nothing: they are gone, or may not speak on the channel."""
        state, now_s = self._state, time.monotonic()
        if now_s < state.checked_s + PING_INTERVAL_S:
            return
        state.checked_s = now_s
        for ref in [ref for ref, copy in state.copies.items() if now_s >= copy.heard_s + SILENCE_S]:
            del state.copies[ref]
            self.counts.num_silent += 1
            self._on_silent()
            get_logger().info("index_copy_silent", worker=str(ref))

    def _forget_unused(self) -> None:
        """Of workers that nobody looks up any more: their lives have ended."""
        state, now_s = self._state, time.monotonic()
        if now_s >= state.swept_s + FORGET_S:
            copies = {ref: copy for ref, copy in state.copies.items() if ref in state.used}
            asked_s = {ref: at_s for ref, at_s in state.asked_s.items() if ref in state.used}
            self._state = _State(copies, asked_s, swept_s=now_s)


async def _unpacked(packed: bytes) -> set[bytes]:
    """The members of a whole set. Raises ValueError."""
    members: set[bytes] = set()
    for at in range(0, len(packed), MAX_UNPACKED * MEMBER_BYTES):
        members.update(_members(packed[at : at + MAX_UNPACKED * MEMBER_BYTES]))
        await asyncio.sleep(0)
    return members


def _members(packed: bytes) -> list[bytes]:
    if len(packed) % MEMBER_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of members")
    return [packed[at : at + MEMBER_BYTES] for at in range(0, len(packed), MEMBER_BYTES)]


def _depth(hashes: Sequence[BlockHash], members: set[bytes]) -> int:
    """Presence is monotone along a chain (a block is evicted before its parent), so a binary search finds the end."""
    low, high = 0, len(hashes)
    if not high or hashes[0][:MEMBER_BYTES] not in members:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1][:MEMBER_BYTES] in members:
            low = middle
        else:
            high = middle - 1
    return low
