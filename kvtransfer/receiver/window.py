"""The chunks that one peer announced, from announcement to written or discarded. Pure: no IO."""

from collections import deque

from common.values.ids import TransferId
from kvtransfer.events import Chunk

# The sender frees its window when it knows that a chunk was taken, we ours when the chunk is written: between the
# two an honest peer may have up to two windows announced, and what the link holds. Twice the windows is a breach.
MAX_ANNOUNCED_WINDOWS = 4


class ReceiveWindow:
    """A queue in announced order: waiting, posted, staged. Posted and staged bytes stay within `max_bytes`.

    A chunk that is larger than the whole window goes alone. `link_bytes`: see PeerReady.
    """

    def __init__(self, max_bytes: int, link_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._link_bytes = link_bytes
        self._waiting: deque[tuple[TransferId, Chunk]] = deque()
        self._posted: deque[tuple[TransferId, Chunk]] = deque()
        self._waiting_bytes = 0
        self._inflight_bytes = 0

    @property
    def num_posted(self) -> int:
        return len(self._posted)

    @property
    def inflight_bytes(self) -> int:
        """Posted, or received and neither written nor discarded."""
        return self._inflight_bytes

    @property
    def posted_bytes(self) -> int:
        return sum(chunk.num_bytes for _, chunk in self._posted)

    @property
    def can_post(self) -> bool:
        if not self._waiting:
            return False
        return self._inflight_bytes == 0 or self._inflight_bytes + self._waiting[0][1].num_bytes <= self._max_bytes

    def announce(self, transfer_id: TransferId, chunk: Chunk) -> str | None:
        """Queue a chunk; a sentence, and nothing queued, when the peer announced far more than it may."""
        announced_bytes = self._waiting_bytes + self._inflight_bytes
        if self._waiting and announced_bytes > MAX_ANNOUNCED_WINDOWS * self._max_bytes + self._link_bytes:
            return f"{announced_bytes} bytes announced in a window of {self._max_bytes}"
        self._waiting.append((transfer_id, chunk))
        self._waiting_bytes += chunk.num_bytes
        return None

    def post_next(self) -> tuple[TransferId, Chunk]:
        """The chunk to post a receive for now; only when `can_post`."""
        assert self.can_post
        entry = self._waiting.popleft()
        self._posted.append(entry)
        self._waiting_bytes -= entry[1].num_bytes
        self._inflight_bytes += entry[1].num_bytes
        return entry

    def take_received(self, transfer_id: TransferId, seq: int) -> Chunk | None:
        """The chunk that was received, or None when it is not the oldest posted one."""
        if not self._posted or self._posted[0][0] != transfer_id or self._posted[0][1].seq != seq:
            return None
        return self._posted.popleft()[1]

    def free(self, num_bytes: int) -> None:
        """A received chunk was written or discarded."""
        assert num_bytes <= self._inflight_bytes
        self._inflight_bytes -= num_bytes
