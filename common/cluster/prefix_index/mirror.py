"""A router's own copy of the index, which answers without asking. Redis has the truth, the copy is a hint of a hint.

    a worker's batches -> Redis -> the news of all workers -> applied to a copy, while the numbers follow one another
    news of a worker without a copy, or a look-up -> its set is read, page by page -> the copy

While a set is read, its news is kept: what changed after the number that was read first is applied on top, so that
neither a large set nor a slow reader stops Redis or misses a change. A gap, a lost connection, a message that cannot
be true or a long silence drops copies; they are read again. A worker without a copy counts as one that caches nothing.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from common.cluster.keys import MEMBER_BYTES, Keys
from common.cluster.prefix_index.stats import WorkerIndexStats, index_stats
from common.cluster.redis import REDIS_ERRORS, connect
from common.telemetry.logs import get_logger
from common.values.ids import BlockHash, WorkerRef

TIMEOUT_S = 0.5
# How long a look-up waits for copies that are being read; so long after that none waits for them.
BUDGET_S = 0.05
# A connection this long without a word is asked for one; after as long again it is given up.
PING_INTERVAL_S = 2.0
RECONNECT_S = 0.5
# Between two readings of a worker's set.
READ_AGAIN_S = 1.0
# Members of a set that are read at a time: a millisecond of Redis, and of this loop.
PAGE_SIZE = 2048
# 17 million tokens of a worker, some 90 MB here. Of a larger set the rest is unknown.
MAX_MEMBERS = 1 << 20
# News kept while a set is read, in members; more than that, and it is read again.
MAX_KEPT_MEMBERS = 1 << 16
MAX_WORKERS = 1024
MAX_READINGS = 4
# Workers say every third of their lease that they live. What is this long without a word may have missed a change.
SILENCE_S = 15.0
_STARTED_OVER = -1


@dataclass(frozen=True, slots=True)
class _Change:
    """From the batch with the number `before`, or from an empty set, to that with the number `after`."""

    before: int
    after: int
    added: list[bytes]
    removed: list[bytes]


@dataclass(slots=True)
class _Copy:
    """A worker's set as of the batch with this number."""

    sequence: int
    members: set[bytes]
    heard_s: float


@dataclass(slots=True)
class _Reading:
    """A set that is being read, and the news that came meanwhile."""

    began_s: float
    task: "asyncio.Task[None] | None" = None
    changes: list[_Change] = field(default_factory=list)
    num_kept: int = 0


@dataclass(slots=True)
class MirrorCounts:
    """What happened, since the start."""

    num_copies: int = 0
    num_failed: int = 0  # sets that Redis did not give
    num_gaps: int = 0
    num_invalid: int = 0
    num_silent: int = 0
    num_connections: int = 0


class PrefixIndexMirror:
    """A `PrefixIndexReader`. `start` it in the running loop and close it. `on_error` gets "copy" or "mirror"."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        on_error: Callable[[str], None] = lambda op: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = MirrorCounts()
        self._on_error = on_error
        self._clock = clock
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=MAX_READINGS + 1)
        self._keys = Keys(namespace)
        self._copies: dict[WorkerRef, _Copy] = {}
        self._readings: dict[WorkerRef, _Reading] = {}
        self._read_s: dict[WorkerRef, float] = {}  # when a set was last asked for
        self._room = asyncio.Semaphore(MAX_READINGS)
        self._checked_s = clock()
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
        tasks = [reading.task for reading in self._readings.values() if reading.task is not None]
        self._forget_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    def known_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int] | None:
        """Leading blocks of `hashes` per worker, those with at least one; None when a worker has no copy here."""
        return self._depths(hashes, workers) if all(ref in self._copies for ref in workers) else None

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """The same; missing copies are read, and waited for as long as the budget lasts."""
        for ref in workers:
            self._read(ref)
        now_s, missing = self._clock(), [self._readings[ref] for ref in workers if ref in self._readings]
        left_s = max((reading.began_s + BUDGET_S - now_s for reading in missing), default=0.0)
        tasks = [reading.task for reading in missing if reading.task is not None]
        if tasks and left_s > 0.0:
            await asyncio.wait(tasks, timeout=left_s)
        return self._depths(hashes, workers)

    def stats(self, workers: Sequence[WorkerRef]) -> tuple[WorkerIndexStats, ...] | None:
        """What each worker has in the index, those with a copy here; None while Redis says nothing."""
        if not self._is_connected:
            return None
        return index_stats({ref: self._copies[ref].members for ref in workers if ref in self._copies})

    def _depths(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        depths = {ref: _depth(hashes, self._copies[ref].members) for ref in workers if ref in self._copies}
        return {ref: depth for ref, depth in depths.items() if depth}

    # ---- reading a set ------------------------------------------------------------------------------

    def _read(self, ref: WorkerRef) -> None:
        """Begin to read a worker's set, unless it is known, on its way, or was asked for a moment ago."""
        now_s = self._clock()
        is_due = now_s >= self._read_s.get(ref, float("-inf")) + READ_AGAIN_S
        is_new = ref not in self._copies and ref not in self._readings
        if self._is_connected and is_new and is_due and len(self._copies) + len(self._readings) < MAX_WORKERS:
            self._read_s[ref] = now_s
            reading = self._readings[ref] = _Reading(now_s)
            reading.task = asyncio.create_task(self._read_set(ref, reading), name=f"index of {ref}")

    async def _read_set(self, ref: WorkerRef, reading: _Reading) -> None:
        try:
            async with self._room:
                sequence, members = await self._fetch(ref)
        except (*REDIS_ERRORS, ValueError):
            self.counts.num_failed += 1
            self._on_error("copy")
        else:
            if sequence is not None and self._readings.get(ref) is reading:
                self._finish(ref, _Copy(sequence, members, self._clock()), reading.changes)
        finally:
            if self._readings.get(ref) is reading:
                del self._readings[ref]

    async def _fetch(self, ref: WorkerRef) -> tuple[int | None, set[bytes]]:
        """The number first: whatever changes after it comes as news. Raises ValueError for what no worker writes."""
        found = await self._redis.get(self._keys.sequence(ref))
        if found is None:
            return None, set()
        members: set[bytes] = set()
        cursor, key = -1, self._keys.members(ref)
        while cursor and len(members) < MAX_MEMBERS:
            cursor, page = await self._redis.sscan(key, max(cursor, 0), count=PAGE_SIZE)
            members.update(each for each in page if isinstance(each, bytes) and len(each) == MEMBER_BYTES)
        return int(found), members

    def _finish(self, ref: WorkerRef, copy: _Copy, changes: list[_Change]) -> None:
        self._copies[ref] = copy
        self.counts.num_copies += 1
        for change in changes:
            if ref in self._copies:
                self._apply(ref, copy, change)

    # ---- what Redis says ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                await self._follow()
            except Exception as error:  # whatever it was, copies that are not kept up to date must go
                self._forget_all()
                if not isinstance(error, REDIS_ERRORS):
                    get_logger().error("index_mirror_failed", error_type=type(error).__name__)
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self) -> None:
        """Until the connection breaks or says nothing. Raises what ended it."""
        async with self._redis.pubsub() as listener:
            await listener.subscribe(self._keys.news)
            is_pinged = False
            while not self._is_closing:
                message = await listener.get_message(timeout=PING_INTERVAL_S)
                if message is not None:
                    self._on_message(message)
                elif is_pinged:
                    raise RedisConnectionError("the index's channel is silent")
                else:
                    await listener.ping()
                is_pinged = message is None
                self._forget_silent()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":  # again if redis-py connects anew: what came between is lost
            self._forget_all()
            self._is_connected = True
            self.counts.num_connections += 1
        elif message["type"] == "message":
            try:
                self._on_change(*_parsed(message["data"]))
            except ValueError:  # no worker of ours wrote that
                self.counts.num_invalid += 1
                self._copies.clear()

    def _on_change(self, ref: WorkerRef, change: _Change) -> None:
        if (copy := self._copies.get(ref)) is not None:
            self._apply(ref, copy, change)
        elif (reading := self._readings.get(ref)) is not None:
            self._keep(ref, reading, change)
        self._read(ref)

    def _keep(self, ref: WorkerRef, reading: _Reading, change: _Change) -> None:
        reading.changes.append(change)
        reading.num_kept += 1 + len(change.added) + len(change.removed)
        if reading.num_kept > MAX_KEPT_MEMBERS:
            self.counts.num_gaps += 1
            del self._readings[ref]  # what it brings is not used

    def _apply(self, ref: WorkerRef, copy: _Copy, change: _Change) -> None:
        if change.after < copy.sequence or (change.after == copy.sequence != change.before):
            return  # the copy is younger: the set was read after this change
        if change.before == _STARTED_OVER:
            copy.members.clear()
        elif change.before != copy.sequence or len(copy.members) + len(change.added) > MAX_MEMBERS:
            self.counts.num_gaps += 1
            del self._copies[ref]
            return
        copy.sequence, copy.heard_s = change.after, self._clock()
        copy.members.update(change.added)
        copy.members.difference_update(change.removed)

    def _forget_all(self) -> None:
        for reading in self._readings.values():
            if reading.task is not None:
                reading.task.cancel()
        self._copies, self._readings, self._read_s = {}, {}, {}
        self._checked_s, self._is_connected = self._clock(), False

    def _forget_silent(self) -> None:
        """Of workers that say nothing: they are gone, or may not speak on the channel."""
        now_s = self._clock()
        if now_s < self._checked_s + PING_INTERVAL_S:
            return
        self._checked_s = now_s
        self._read_s = {ref: at_s for ref, at_s in self._read_s.items() if now_s < at_s + SILENCE_S}
        for ref in [ref for ref, copy in self._copies.items() if now_s >= copy.heard_s + SILENCE_S]:
            del self._copies[ref]
            self.counts.num_silent += 1
            self._on_error("mirror")
            get_logger().info("index_copy_silent", worker=str(ref))


def _parsed(data: bytes) -> tuple[WorkerRef, _Change]:
    """A change as the scripts publish it. Raises ValueError."""
    head, _, body = data.partition(b"\n")
    before, after, num_added, ref_text = head.split(b" ", 3)
    cut = int(num_added)
    change = _Change(int(before), int(after), _members(body[:cut]), _members(body[cut:]))
    return WorkerRef.parse(ref_text.decode()), change


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
