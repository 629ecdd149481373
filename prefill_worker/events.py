"""Events and effects of the prefill core. Pure: no IO.

The core owns a `kvtransfer.sender.SenderCore`: sender events pass through it, and the sender's network effects
come out of it unchanged.
"""

from dataclasses import dataclass

from common.engine.plan import StepPlan, StepResult
from common.ids import BlockHash, RouterId
from common.messages import AttemptFailed, Cancel, FirstTokens, Prefill, Refused
from kvtransfer.events import ConnectPeer, DropPeer, SendCancel, SendChunk, SenderEvent, SendFinished


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A router asked for something."""

    router_id: RouterId
    message: Prefill | Cancel


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's stream ended: everything it asked for is cancelled."""

    router_id: RouterId


@dataclass(frozen=True, slots=True)
class LayerComputed:
    """The running step has written the KV of layers [0, num_layers) for all its tokens."""

    step_id: int
    num_layers: int


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


PrefillEvent = MessageReceived | RouterLost | LayerComputed | StepFinished | StepFailed | DrainRequested | SenderEvent


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward pass; ends in StepFinished or StepFailed. At most one is running.

    `reports_layers`: LayerComputed is wanted while it runs (some sequence has a transfer).
    """

    plan: StepPlan
    reports_layers: bool


@dataclass(frozen=True, slots=True)
class SendToRouter:
    router_id: RouterId
    message: FirstTokens | Refused | AttemptFailed


@dataclass(frozen=True, slots=True)
class PublishBlocks:
    """Tell the prefix index what became findable and what went. At most one per `handle`, the last effect."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    pass


PrefillEffect = (
    RunStep | SendToRouter | PublishBlocks | Drained | ConnectPeer | SendChunk | SendFinished | SendCancel | DropPeer
)
