"""What the sender core knows of its transfers and peers. Pure: no IO. Mutated by `SenderCore` alone."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from common.values.ids import TransferId, WorkerRef
from kvtransfer.chunk.plan import ChunkCutter
from kvtransfer.events import Chunk, FirstToken, TransferOutcome, TransferStarted


class TransferState(StrEnum):
    """Where a transfer stands; see the table in `kvtransfer.sender.core`."""

    ABSENT = "absent"
    STREAMING = "streaming"
    FLUSHING = "flushing"
    AWAITING = "awaiting"
    ENDING = "ending"


class SenderPeerState(StrEnum):
    """Where control stream and link to a peer stand."""

    ABSENT = "absent"
    CONNECTING = "connecting"
    READY = "ready"
    DROPPING = "dropping"


@dataclass(slots=True)
class SenderTransfer:
    """One live transfer. `queue` holds chunks that are computed and not announced."""

    started: TransferStarted
    cutter: ChunkCutter
    state: TransferState = TransferState.STREAMING
    queue: deque[Chunk] = field(default_factory=deque)
    tokens: tuple[FirstToken, ...] = ()
    is_known_to_peer: bool = False
    num_unpacked: int = 0  # emitted SendChunks that still read the blocks
    outcome: TransferOutcome | None = None  # set in ENDING
    reason: str = ""

    @property
    def transfer_id(self) -> TransferId:
        return self.started.transfer_id


@dataclass(slots=True)
class Outstanding:
    """An emitted SendChunk that the peer has not taken."""

    peer: WorkerRef
    num_bytes: int
    is_packed: bool = False


@dataclass(slots=True)
class SenderPeer:
    """One peer. `rotation` names the transfers with queued chunks, next to send first."""

    last_progress_s: float
    state: SenderPeerState = SenderPeerState.CONNECTING
    transfer_ids: dict[TransferId, None] = field(default_factory=dict)  # an ordered set
    rotation: deque[TransferId] = field(default_factory=deque)
    num_outstanding: int = 0
    inflight_bytes: int = 0

    @property
    def owes_progress(self) -> bool:
        return self.state is SenderPeerState.CONNECTING or (
            self.state is SenderPeerState.READY and self.num_outstanding > 0
        )
