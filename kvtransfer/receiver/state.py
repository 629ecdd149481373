"""What the receiver core knows of expectations, transfers and peers. Pure: no IO. Mutated by `ReceiverCore` alone."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from common.values.ids import AttemptId, TransferId, WorkerRef
from common.values.request import KvChunkTiming
from kvtransfer.events import Chunk, FinishAnnounced, TransferExpected, TransferReceived
from kvtransfer.receiver.coverage import Coverage
from kvtransfer.receiver.window import ReceiveWindow

MAX_REFUSED_PER_PEER = 1024
# Of each transfer, for people to look at.
MAX_TIMED_CHUNKS = 256


class TransferStatus(StrEnum):
    """What a transfer named by a peer is to this worker; see the table in `kvtransfer.receiver.core`."""

    UNWANTED = "unwanted"
    OPEN = "open"
    CURRENT = "current"


class ExpectationState(StrEnum):
    """Where an attempt's expectation stands."""

    ABSENT = "absent"
    EXPECTED = "expected"
    WITHDRAWN = "withdrawn"


class ReceiverPeerState(StrEnum):
    """Where control stream and link to a peer stand."""

    ABSENT = "absent"
    READY = "ready"
    DROPPING = "dropping"


@dataclass(slots=True)
class ReceiverTransfer:
    """The transfer that is filling an attempt's blocks."""

    transfer_id: TransferId
    peer: WorkerRef
    coverage: Coverage
    num_announced: int = 0
    num_written: int = 0
    written: deque[tuple[float, Chunk]] = field(default_factory=lambda: deque(maxlen=MAX_TIMED_CHUNKS))
    num_bytes: int = 0
    first_announced_s: float = 0.0
    finish: FinishAnnounced | None = None
    finished_s: float = 0.0

    def note_written(self, chunk: Chunk, now_s: float) -> None:
        self.num_written += 1
        self.written.append((now_s, chunk))

    def chunk_timings(self, now_s: float) -> tuple[KvChunkTiming, ...]:
        """When the last chunks were in place, all KV being so now."""
        return tuple(
            KvChunkTiming(now_s - at_s, chunk.layer_start, chunk.layer_end, chunk.token_end - chunk.token_start)
            for at_s, chunk in self.written
        )

    def problem(self, chunk: Chunk) -> str | None:
        """What is wrong with the number of an announced chunk, or None."""
        if chunk.seq != self.num_announced:
            return f"expected chunk {self.num_announced}, announced {chunk.seq}"
        if self.finish is not None and chunk.seq >= self.finish.num_chunks:
            return f"expected {self.finish.num_chunks} chunks, announced one more"
        return None

    def finish_problem(self, event: FinishAnnounced, num_first_tokens: int) -> str | None:
        """What of FinishAnnounced is not as expected or announced, or None."""
        if len(event.tokens) != num_first_tokens:
            return f"expected {num_first_tokens} first tokens, got {len(event.tokens)}"
        if event.num_chunks < self.num_announced:
            return f"expected {event.num_chunks} chunks, announced {self.num_announced}"
        return None

    def received(self, now_s: float) -> TransferReceived:
        """The report of a transfer that is complete now."""
        assert self.finish is not None
        transfer_s = now_s - self.first_announced_s
        return TransferReceived(
            self.transfer_id,
            self.finish.tokens,
            self.num_bytes,
            self.num_written,
            transfer_s,
            min(transfer_s, now_s - self.finished_s),
            self.chunk_timings(now_s),
            self.finish.transport,
            self.finish.link_bytes_per_s,
        )


@dataclass(slots=True)
class Expectation:
    """Room that was granted. `newest_try` is the highest prefill try that ever began; older ones are unwanted."""

    expected: TransferExpected
    state: ExpectationState = ExpectationState.EXPECTED
    current: ReceiverTransfer | None = None
    newest_try: int = -1
    num_writes: int = 0  # emitted WriteChunks that still write the blocks

    @property
    def attempt_id(self) -> AttemptId:
        return self.expected.attempt_id

    def check(self, writes: Iterable["Write"]) -> None:
        """Raise AssertionError when it contradicts itself or what is being written."""
        assert self.num_writes == sum(write.attempt is self for write in writes)
        if self.state is ExpectationState.WITHDRAWN:
            assert self.num_writes > 0
            assert self.current is None
        assert self.current is None or self.current.transfer_id.prefill_try == self.newest_try


@dataclass(slots=True)
class ReceiverPeer:
    """One peer's link."""

    ref: WorkerRef
    window: ReceiveWindow
    last_progress_s: float
    state: ReceiverPeerState = ReceiverPeerState.READY
    refused: OrderedDict[TransferId, None] = field(
        default_factory=OrderedDict
    )  # those that were answered with SendCancel

    @property
    def owes_progress(self) -> bool:
        return self.state is ReceiverPeerState.READY and self.window.num_posted > 0

    def check(self, writes: Iterable["Write"]) -> None:
        """Raise AssertionError when the window contradicts what is being written, or rests with room."""
        writing_bytes = sum(write.chunk.num_bytes for write in writes if write.peer is self)
        assert self.window.inflight_bytes == writing_bytes + self.window.posted_bytes
        assert self.state is ReceiverPeerState.DROPPING or not self.window.can_post

    def refuse(self, transfer_id: TransferId) -> bool:
        """Note that the transfer is answered with SendCancel; False when it was before."""
        if transfer_id in self.refused:
            return False
        self.refused[transfer_id] = None
        if len(self.refused) > MAX_REFUSED_PER_PEER:
            self.refused.popitem(last=False)
        return True


@dataclass(slots=True)
class Write:
    """An emitted WriteChunk. `peer` is the link that it came by, which may be gone meanwhile."""

    attempt: Expectation
    peer: ReceiverPeer
    chunk: Chunk
