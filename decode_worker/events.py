"""Events and effects of the decode core. Pure: no IO.

The core owns a `kvtransfer.receiver.ReceiverCore`: receiver events pass through it, and the receiver's network
effects come out of it unchanged.
"""

from dataclasses import dataclass

from common.engine.plan import StepPlan, StepResult
from common.ids import BlockHash, RouterId
from common.messages import (
    AttemptFailed,
    Cancel,
    Granted,
    HandoffReport,
    Refused,
    Reserve,
    TokenBatch,
    TransferFailed,
)
from kvtransfer.events import (
    DiscardChunk,
    DropPeer,
    PostReceive,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    WriteChunk,
)


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A router asked for something."""

    router_id: RouterId
    message: Reserve | Cancel


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's stream ended: everything it asked for is cancelled."""

    router_id: RouterId


@dataclass(frozen=True, slots=True)
class StepFinished:
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole forward pass raised; nothing of it counts."""

    step_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse new work; Drained follows when nothing is left, or at the end of the grace."""

    grace_s: float


DecodeEvent = MessageReceived | RouterLost | StepFinished | StepFailed | DrainRequested | ReceiverEvent


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward pass; ends in StepFinished or StepFailed. At most one is running."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class SendToRouter:
    router_id: RouterId
    message: Granted | Refused | TokenBatch | HandoffReport | TransferFailed | AttemptFailed


@dataclass(frozen=True, slots=True)
class PublishBlocks:
    """Tell the prefix index what became findable and what went. At most one per `handle`, the last effect."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    pass


DecodeEffect = (
    RunStep
    | SendToRouter
    | PublishBlocks
    | Drained
    | PostReceive
    | WriteChunk
    | DiscardChunk
    | SendAcknowledged
    | SendCancel
    | DropPeer
)
