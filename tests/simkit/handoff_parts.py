"""What surrounds the two handoff cores in `handoff_world`: sessions, tries and grants; and the cores' settings."""

from dataclasses import dataclass, field
from typing import NamedTuple

from common.values.ids import TransferId, WorkerRef
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelAnnounced,
    CancelledByPeer,
    ChunkAnnounced,
    FinishAnnounced,
    PostReceive,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    SendChunk,
    SenderEvent,
    SendFinished,
    TransferOutcome,
)
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.sender.core import SenderCore
from tests.caches import row_spec
from tests.simkit.layered_engine import Payload

NUM_LAYERS = 2
PLANNER = ChunkPlanner(row_spec(NUM_LAYERS, 1), min_chunk_bytes=1, frame_bytes=0)
WINDOW_BYTES = 2
LINK_TIMEOUT_S = 10.0


class Silent:
    """A `History` that remembers nothing: what was is not part of what is."""

    def note(self, key: object, event: object) -> None: ...

    def invalid(self, key: object, problem: str) -> AssertionError:
        return AssertionError(f"{key}: {problem}")


class Pair(NamedTuple):
    """The lives of two processes, as "p0.1" and "d.1"."""

    sender: str
    receiver: str

    def __str__(self) -> str:
        return f"{self.sender}>{self.receiver}"


@dataclass(slots=True)
class Session:
    """Control stream and link of one pair, as the two shells see them.

    Either side hears of the end in its own time: until then it may still post what its threads had done before.
    """

    is_sender_ready: bool = False
    is_sender_done: bool = False  # has heard of the end, or is dead
    is_known: bool = False  # to the receiver: from PeerReady to PeerLost
    is_broken: bool = False
    is_predecessor_known: bool = False  # the receiver has not heard that an older session broke
    is_malformed: bool = False  # an announcement was changed under way
    up: list[ReceiverEvent] = field(default_factory=list)
    down: list[SenderEvent] = field(default_factory=list)
    packing: list[SendChunk] = field(default_factory=list)
    sent: list[tuple[SendChunk, Payload]] = field(default_factory=list)  # on the link, not taken
    taken: list[SendChunk] = field(default_factory=list)  # taken, the sender does not know yet
    posted: list[PostReceive] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.is_sender_done and not self.is_known


@dataclass(slots=True)
class Try:
    """The prefill of one try: how far compute has come and whether its transfer has ended."""

    transfer_id: TransferId
    pair: Pair
    num_computed: int = 0
    outcome: TransferOutcome | None = None
    ranks: "Ranks | None" = None  # of a worker that has several


@dataclass(slots=True)
class Ranks:
    """How far each rank of a prefill worker is with a prompt: it writes each layer of each token's step.

    Ranks meet in a layer to sum its attention, so none is more than one layer ahead; and at the end of a step.
    """

    written: list[int]  # layers of all steps so far, by rank
    num_steps: int = 0  # that have ended
    num_layers: int = 0  # of the running step that rank 0 has written: what `OneBehind` keeps

    def who_can_write(self) -> list[int]:
        least = min(self.written)
        return [] if self.can_end_step else [rank for rank, num in enumerate(self.written) if num == least]

    @property
    def can_end_step(self) -> bool:
        return min(self.written) == (self.num_steps + 1) * NUM_LAYERS

    def has_all(self, layer: int, token: int) -> bool:
        """Every rank has written it."""
        return min(self.written) > token * NUM_LAYERS + layer


@dataclass(slots=True)
class Grant:
    """An attempt's blocks on a life of the decode worker. `cells`: (layer, token) -> the try that wrote it."""

    receiver: str
    is_expected: bool = True
    end: str | None = None  # received, released, crashed
    cells: dict[tuple[int, int], int] = field(default_factory=dict)


def new_sender() -> SenderCore:
    core = SenderCore(PLANNER, WINDOW_BYTES, LINK_TIMEOUT_S)
    core._history = Silent()  # type: ignore[assignment]
    return core


def new_receiver() -> ReceiverCore:
    core = ReceiverCore(PLANNER, WINDOW_BYTES, LINK_TIMEOUT_S)
    core._history = Silent()  # type: ignore[assignment]
    return core


def ref_of(name: str) -> WorkerRef:
    return WorkerRef(*name.split("."))


def next_life(name: str) -> str:
    worker_id, life = name.split(".")
    return f"{worker_id}.{int(life) + 1}"


def name_of(ref: WorkerRef) -> str:
    return f"{ref.worker_id}.{ref.incarnation}"


def message_up(ref: WorkerRef, effect: SendChunk | SendFinished | SendCancel) -> ReceiverEvent:
    """What the receiver reads of a sender's effect."""
    match effect:
        case SendChunk(_, transfer_id, chunk):
            return ChunkAnnounced(ref, transfer_id, chunk)
        case SendFinished(_, transfer_id, num_chunks, tokens):
            return FinishAnnounced(ref, transfer_id, num_chunks, tokens)
        case SendCancel(_, transfer_id, reason):
            return CancelAnnounced(ref, transfer_id, reason)


def message_down(effect: SendAcknowledged | SendCancel) -> SenderEvent:
    """What the sender reads of a receiver's effect."""
    if isinstance(effect, SendAcknowledged):
        return AcknowledgedByPeer(effect.transfer_id)
    return CancelledByPeer(effect.transfer_id, effect.reason)
