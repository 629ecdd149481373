"""Events and effects of the prefill core. Pure: no IO.

The core owns a `kvtransfer.sender.core.SenderCore`: sender events pass through it, and the sender's
network effects come out of it unchanged.
"""

from common.worker.events import (
    Drained,
    DrainRequested,
    LayerComputed,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)
from kvtransfer.events import ConnectPeer, DropPeer, SendCancel, SendChunk, SenderEvent, SendFinished

__all__ = [
    "DrainRequested",
    "Drained",
    "LayerComputed",
    "MessageReceived",
    "NetworkEffect",
    "PrefillEffect",
    "PrefillEvent",
    "PublishBlocks",
    "RouterLost",
    "RunStep",
    "SendToRouter",
    "StepFailed",
    "StepFinished",
]

PrefillEvent = MessageReceived | RouterLost | LayerComputed | StepFinished | StepFailed | DrainRequested | SenderEvent

NetworkEffect = ConnectPeer | SendChunk | SendFinished | SendCancel | DropPeer
PrefillEffect = RunStep | SendToRouter | PublishBlocks | Drained | NetworkEffect
