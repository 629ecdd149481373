"""A worker's side of the index: turns what its block pool stored and evicted into numbered batches for Redis.

    publish -> pending (net change per block) -> batch n+1 applied to set of batch n
                                              -> anything else (gap, no lease, timeout): start over
    start over: empty the set, then send a snapshot of the pool in batches, then pending as usual

Redis holds the number of the last batch; a mismatch (Redis restarted, was wiped, failed over, or an answer was
lost) is found by the next batch or heartbeat, and so is a set that lost members (evicted, deleted). The routers'
mirrors hear of each. All calls in one event loop.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import OutOfMemoryError, ResponseError

from common.cluster.keys import MEMBER_BYTES, Keys, pack
from common.cluster.redis import REDIS_ERRORS, connect, wait_for_event
from common.cluster.scripts import APPLY, RESET
from common.telemetry.logs import get_logger
from common.values.ids import BlockHash, WorkerRef

TIMEOUT_S = 0.5
MAX_BATCH = 4096
MAX_PENDING = 1 << 17
# After Redis refused additions for lack of memory: how long until the whole set is tried again.
OUT_OF_MEMORY_PAUSE_S = 5.0
# What a busy worker stores within this time travels as one batch; a hint may be this much later.
LINGER_S = 0.005
# A gap so soon after the whole set was sent waits for the next heartbeat: Redis may be evicting what it gets.
RESYNC_PAUSE_S = 1.0

_GAP = -1


@dataclass(slots=True)
class WriterCounts:
    """What happened to batches, since the start."""

    num_batches: int = 0
    num_resyncs: int = 0
    num_failed: int = 0
    num_dropped: int = 0  # additions that Redis had no memory for
    num_untold: int = 0  # batches and heartbeats that were not published to the mirrors


class RedisIndexWriter:
    """Publishes one worker's blocks. `run` does the work; owns its connections, close it."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        ref: WorkerRef,
        lease_s: float,
        snapshot: Callable[[], Sequence[BlockHash]],
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.counts = WriterCounts()
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._apply = self._redis.register_script(APPLY)
        self._reset = self._redis.register_script(RESET)
        keys = Keys(namespace)
        self._key_names = [keys.lease(ref), keys.members(ref), keys.sequence(ref)]
        self._news = [keys.news, str(ref)]
        self._ttl_ms = int(lease_s * 1000)
        self._heartbeat_s = lease_s / 3
        self._snapshot = snapshot
        self._max_pending = max_pending
        self._pending: dict[BlockHash, bool] = {}  # is the block stored?
        self._snapshot_left: list[BlockHash] = []
        self._sequence = 0
        self._num_members = 0  # that the set in Redis should have
        self._resynced_s = float("-inf")
        self._needs_resync = True
        self._retry_dropped_s: float | None = None
        self._untold_reason = ""
        self._has_news = asyncio.Event()
        self._is_closing = False

    def publish(self, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]) -> None:
        """Queue a batch; a block in both lists counts as evicted. Too much pending becomes a resync."""
        if self._needs_resync:
            return  # the snapshot will hold it
        self._pending.update(dict.fromkeys(stored, True))
        self._pending.update(dict.fromkeys(evicted, False))
        if len(self._pending) > self._max_pending:
            self._start_over()
        self._has_news.set()

    async def run(self) -> None:
        """Send what is pending, and a heartbeat when nothing is, until `stop`. Redis may come and go."""
        while not self._is_closing:
            self._has_news.clear()
            try:
                await self.flush()
            except REDIS_ERRORS:
                self.counts.num_failed += 1
                self._start_over()
            await wait_for_event(self._has_news, self._heartbeat_s)
            if not self._is_closing:
                await asyncio.sleep(LINGER_S)

    def stop(self) -> None:
        """Have `run` return, after the round that it is in."""
        self._is_closing = True
        self._has_news.set()

    async def flush(self) -> None:
        """One round: resync if needed, then everything pending, else the heartbeat that finds a gap."""
        if self._retry_dropped_s is not None and asyncio.get_running_loop().time() >= self._retry_dropped_s:
            self._start_over()
        if self._needs_resync and not await self._resync():
            return
        is_beating = not (self._snapshot_left or self._pending)
        while is_beating or self._snapshot_left or self._pending:
            is_beating = False
            if not await self._send(*self._next_batch()):
                return

    async def close(self) -> None:
        await self._redis.aclose()

    def _start_over(self) -> None:
        self._needs_resync = True
        self._pending.clear()
        self._snapshot_left.clear()

    async def _resync(self) -> bool:
        """Empty the set in Redis and queue the pool's content. False when Redis would not (no lease yet)."""
        # A number never used before: a batch of an earlier life still on its way can't be applied on top.
        self._sequence += 1
        async with asyncio.timeout(TIMEOUT_S):
            answer = int(await self._reset(keys=self._key_names, args=[self._ttl_ms, self._sequence, *self._news]))
        if answer < 0:
            return False
        self._num_members, self._resynced_s = 0, asyncio.get_running_loop().time()
        # No await from here: what the pool stores later is published on top of this snapshot.
        self._snapshot_left = list(self._snapshot())
        self._needs_resync = False
        self._retry_dropped_s = None
        self.counts.num_resyncs += 1
        return True

    def _next_batch(self) -> tuple[list[BlockHash], list[BlockHash]]:
        if self._snapshot_left:
            added, self._snapshot_left = self._snapshot_left[:MAX_BATCH], self._snapshot_left[MAX_BATCH:]
            return added, []
        batch = dict(itertools.islice(self._pending.items(), MAX_BATCH))
        for block_hash in batch:
            del self._pending[block_hash]
        added = [block_hash for block_hash, is_stored in batch.items() if is_stored]
        return added, [block_hash for block_hash, is_stored in batch.items() if not is_stored]

    async def _send(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> bool:
        """Apply one batch. False when Redis is at another number: everything is sent anew."""
        try:
            answer = await self._call_apply(added, removed)
        except ResponseError as error:
            if not _is_out_of_memory(error):
                raise
            answer = await self._send_removals_only(added, removed)
        if answer <= _GAP:
            self._start_over()
            if asyncio.get_running_loop().time() >= self._resynced_s + RESYNC_PAUSE_S:
                self._has_news.set()
            return False
        self._sequence = answer
        self.counts.num_batches += bool(added or removed)
        return True

    async def _send_removals_only(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> int:
        """Redis is full: the additions are lost until a later resync, the removals are not."""
        self.counts.num_dropped += len(added)
        self._retry_dropped_s = asyncio.get_running_loop().time() + OUT_OF_MEMORY_PAUSE_S
        return await self._call_apply([], removed)

    async def _call_apply(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> int:
        batch: list[bytes | int | str] = [MEMBER_BYTES, self._ttl_ms, self._sequence, pack(added), pack(removed)]
        async with asyncio.timeout(TIMEOUT_S):
            answer = await self._apply(keys=self._key_names, args=[*batch, *self._news, self._num_members])
        if isinstance(answer, int):
            return answer
        sequence, self._num_members, untold_reason = answer
        self._note_untold(untold_reason.decode(errors="replace"))
        return int(sequence)

    def _note_untold(self, reason: str) -> None:
        """Without news the mirrors' copies expire again and again: most likely a right on the channel is missing."""
        self.counts.num_untold += bool(reason)
        if reason and not self._untold_reason:
            get_logger().warning("index_news_refused", reason=reason)
        self._untold_reason = reason


def _is_out_of_memory(error: ResponseError) -> bool:
    return isinstance(error, OutOfMemoryError) or "OOM" in str(error)
