"""Events and effects that both worker cores share. Pure: no IO."""

from dataclasses import dataclass

from common.engine.contract.plan import StepPlan
from common.values.ids import BlockHash, RouterId
from common.values.messages import Cancel, Prefill, Reserve, WorkerMessage

# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A router asked for something: Prefill or Cancel of a prefill worker, Reserve or Cancel of a decode worker."""

    router_id: RouterId
    message: Prefill | Reserve | Cancel


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's stream ended: everything it asked for is cancelled."""

    router_id: RouterId


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse new work; Drained follows when nothing is left, or at the end of the grace."""

    grace_s: float


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward pass; ends in StepFinished or StepFailed. At most one is running.

    `reports_layers`: LayerComputed is wanted while it runs (some sequence has a transfer).
    """

    plan: StepPlan
    reports_layers: bool = False


@dataclass(frozen=True, slots=True)
class SendToRouter:
    router_id: RouterId
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class PublishBlocks:
    """Tell the prefix index what became findable and what went. At most one per `handle`, the last effect."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left; the worker may end."""
