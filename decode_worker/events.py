"""Events and effects of the decode core. Pure: no IO.

The core owns a `kvtransfer.receiver.core.ReceiverCore`: receiver events pass through it, and the receiver's
network effects come out of it unchanged.
"""

from common.worker.events import (
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
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

__all__ = [
    "DecodeEffect",
    "DecodeEvent",
    "DrainRequested",
    "Drained",
    "MessageReceived",
    "NetworkEffect",
    "PublishBlocks",
    "RouterLost",
    "RunStep",
    "SendToRouter",
    "StepFailed",
    "StepFinished",
]

DecodeEvent = MessageReceived | RouterLost | StepFinished | StepFailed | DrainRequested | ReceiverEvent

NetworkEffect = PostReceive | WriteChunk | DiscardChunk | SendAcknowledged | SendCancel | DropPeer
DecodeEffect = RunStep | SendToRouter | PublishBlocks | Drained | NetworkEffect
