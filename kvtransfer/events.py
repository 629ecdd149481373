"""Events and effects of the two handoff cores. Pure: no IO.

Three truths shape them (measured with gloo; NCCL is alike):
* a posted receive or send cannot be withdrawn, so what was announced is always drained;
* no network operation touches a block: a send packs into a staging buffer first, a receive lands in one,
  so blocks are busy only between `SendChunk` and `ChunkPacked`, and between `WriteChunk` and `ChunkWritten`;
* the control stream and the link of a pair live and die together: a `PeerLost` ends every transfer on it.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.values.ids import AttemptId, TransferId, WorkerRef
from common.values.request import KvChunkTiming, SampledToken


class TransferOutcome(StrEnum):
    """How a transfer ended, on each side exactly once."""

    DONE = "done"
    CANCELLED = "cancelled"
    LINK_LOST = "link_lost"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one request's KV: layers [layer_start, layer_end), counted within one group of the model's `KVSpec`,
    x tokens [token_start, token_end) x shards [shard_start, shard_end) of each plane.

    `seq` counts from 0 per transfer; `num_bytes` is the length on the link, header and tag included.
    """

    seq: int
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    num_bytes: int
    group_idx: int = 0
    shard_start: int = 0
    shard_end: int = 1


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the prefill worker sampled for one choice."""

    choice_idx: int
    token: SampledToken


# ---- both sides: peers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Control stream and link to this incarnation of a peer are up."""

    peer: WorkerRef
    link_bytes: int = 0  # what the sender may take for received and its peer has yet to receive


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Control stream or link died, or could not be built. Every operation on it has ended or will be ignored."""

    peer: WorkerRef
    reason: str


# ---- sender: local events ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """Ship tokens [first_token, num_tokens) of a request to `peer`; `block_tables` stay valid until TransferEnded.

    Of a group with a window only the tokens that later ones read: its table is not read before them.
    """

    transfer_id: TransferId
    peer: WorkerRef
    address: str
    first_token: int
    num_tokens: int
    block_tables: tuple[tuple[int, ...], ...]  # one per group
    deadline_s: float  # absolute, this worker's monotonic clock


@dataclass(frozen=True, slots=True)
class TokensComputed:
    """The KV of layers [0, num_layers) is written for every token below `token_end` of a transfer.

    Fired per layer while a chunk computes (`num_layers` grows), then `token_end` grows by the next chunk.
    Tokens below the previous `token_end` have all layers.
    """

    transfer_id: TransferId
    num_layers: int
    token_end: int


@dataclass(frozen=True, slots=True)
class FirstTokensSampled:
    """The prompt is computed; no more KV will follow."""

    transfer_id: TransferId
    tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class TransferCancelRequested:
    """Local wish to end a transfer early (client gone, step failed, superseded)."""

    transfer_id: TransferId
    reason: str


# ---- sender: from link and control ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkPacked:
    """The chunk is in a staging buffer: the blocks are not read any more."""

    transfer_id: TransferId
    seq: int


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The peer took the chunk: its staging buffer is free."""

    transfer_id: TransferId
    seq: int


@dataclass(frozen=True, slots=True)
class AcknowledgedByPeer:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class CancelledByPeer:
    transfer_id: TransferId
    reason: str


SenderEvent = (
    PeerReady
    | PeerLost
    | TransferStarted
    | TokensComputed
    | FirstTokensSampled
    | TransferCancelRequested
    | ChunkPacked
    | ChunkSent
    | AcknowledgedByPeer
    | CancelledByPeer
)

# ---- sender: effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Build control stream and link; ends in PeerReady or PeerLost."""

    peer: WorkerRef
    address: str


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Announce the chunk on the control stream, pack it from `block_table`, send it on the link, in this order.

    `block_table` is that of the chunk's group.

    Ends in ChunkPacked then ChunkSent, or in PeerLost.
    """

    peer: WorkerRef
    transfer_id: TransferId
    chunk: Chunk
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Tell the receiver that the prompt is computed, what was sampled, and that `num_chunks` chunks make it up.

    Goes out at once: the last chunks may be announced after it.
    """

    peer: WorkerRef
    transfer_id: TransferId
    num_chunks: int
    tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Either side: tell the peer that the transfer is over."""

    peer: WorkerRef
    transfer_id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """Local: the transfer is terminal and nothing touches its blocks any more. Exactly one per transfer."""

    transfer_id: TransferId
    outcome: TransferOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close control stream and link to a peer that stopped making progress; ends in PeerLost."""

    peer: WorkerRef
    reason: str


SenderEffect = ConnectPeer | SendChunk | SendFinished | SendCancel | TransferEnded | DropPeer

# ---- receiver: local events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferExpected:
    """Room is granted: any prefill worker that announces a transfer for this attempt may fill it.

    Covers tokens [first_token, num_tokens) through `block_tables`; stands until ExpectationWithdrawn or DONE.
    Of a group with a window it covers the tokens that later ones read: its table is not read before them.
    """

    attempt_id: AttemptId
    first_token: int
    num_tokens: int
    block_tables: tuple[tuple[int, ...], ...]  # one per group
    num_first_tokens: int


@dataclass(frozen=True, slots=True)
class ExpectationWithdrawn:
    """The attempt is cancelled or failed here: end its transfer, then report AttemptReleased."""

    attempt_id: AttemptId
    reason: str


# ---- receiver: from link and control ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    peer: WorkerRef
    transfer_id: TransferId
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """A posted receive ended with all bytes in a staging buffer. `error` names what does not match, if anything."""

    peer: WorkerRef
    transfer_id: TransferId
    seq: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """The staged chunk is in the blocks."""

    transfer_id: TransferId
    seq: int


@dataclass(frozen=True, slots=True)
class FinishAnnounced:
    peer: WorkerRef
    transfer_id: TransferId
    num_chunks: int
    tokens: tuple[FirstToken, ...]
    transport: str = ""
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CancelAnnounced:
    """The sender ended the transfer early; what it announced before still arrives."""

    peer: WorkerRef
    transfer_id: TransferId
    reason: str


ReceiverEvent = (
    PeerReady
    | PeerLost
    | TransferExpected
    | ExpectationWithdrawn
    | ChunkAnnounced
    | ChunkReceived
    | ChunkWritten
    | FinishAnnounced
    | CancelAnnounced
)

# ---- receiver: effects ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Receive the next announced chunk of `peer` into a staging buffer; ends in ChunkReceived or PeerLost.

    Emitted in announced order per peer, inside the bytes-in-flight window.
    """

    peer: WorkerRef
    transfer_id: TransferId
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Scatter a received chunk from its staging buffer into blocks; ends in ChunkWritten, always.

    `block_table` is that of the chunk's group. Performed in emitted order, so a newer try's bytes land last.
    """

    peer: WorkerRef
    transfer_id: TransferId
    chunk: Chunk
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiscardChunk:
    """Give the staging buffer of a received chunk back unread."""

    peer: WorkerRef
    transfer_id: TransferId
    seq: int


@dataclass(frozen=True, slots=True)
class SendAcknowledged:
    peer: WorkerRef
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class TransferReceived:
    """Local: all KV and the first tokens are in. Exactly one per attempt, unless it is withdrawn first."""

    transfer_id: TransferId
    tokens: tuple[FirstToken, ...]
    num_bytes: int
    num_chunks: int
    transfer_s: float  # first announcement to last chunk in place
    exposed_s: float  # the part of it after FinishAnnounced
    chunks: tuple[KvChunkTiming, ...] = ()  # the last ones, in order of arrival
    transport: str = ""
    link_bytes_per_s: float = 0.0  # as the sender measured it lately; 0: not yet


@dataclass(frozen=True, slots=True)
class TransferFailedLocally:
    """Local: a transfer ended early; the expectation stands and another try may come."""

    transfer_id: TransferId
    outcome: TransferOutcome
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptReleased:
    """Local: answer to ExpectationWithdrawn; nothing touches the attempt's blocks any more."""

    attempt_id: AttemptId


ReceiverEffect = (
    PostReceive
    | WriteChunk
    | DiscardChunk
    | SendAcknowledged
    | SendCancel
    | TransferReceived
    | TransferFailedLocally
    | AttemptReleased
    | DropPeer
)
