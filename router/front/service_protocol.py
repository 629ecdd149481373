"""What the front ends (gRPC, HTTP) need of the router's service. Values and one Protocol; no IO.

`router/service.py` implements it over the router core; tests use a scripted one.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.values.ids import RequestId
from common.values.messages import Role, WorkerState
from router.core.generation import GenerationEvent, GenerationRequest
from router.observe.event_log import EventLog
from router.observe.recent import RecentView

# What msgspec can write as JSON: str, numbers, None, dataclasses, mappings and sequences of these.
JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RankView:
    """One of the processes that run a worker's model together. `silent_s`: since its worker heard of it."""

    rank: int
    pid: int
    device: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the router sees it now. The field names are those of `/admin/v1/state`.

    used + cached + free + held == total: used = referenced by a request, held = reserved or in a handoff,
    cached = free but reusable.
    """

    worker_id: str
    incarnation: str
    role: Role
    state: WorkerState
    pid: int
    address: str
    running: int
    waiting: int
    waiting_uncached_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    kv_blocks_held: int
    block_size: int
    pairing_key: str = ""
    kv_dtype: str = ""
    device: str = ""
    num_preemptions: int = 0
    max_num_seqs: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    silent_s: float = 0.0  # since it last said anything
    ranks: tuple[RankView, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Everything `/admin/v1/state` and `GetClusterState` say."""

    workers: tuple[WorkerView, ...]
    num_queued: int = 0
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request would find a prefill and a decode worker that can pair; if not, why not."""

    is_ready: bool
    reasons: tuple[str, ...] = ()


class GenerationService(Protocol):
    """The router behind its front ends. All methods belong to one event loop."""

    events: EventLog

    def submit(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Run a request. Events arrive as `router.generation` says; the last is Finished or Failed.

        After `cancel` the iterator ends soon, at most with one more event. Refusals (queue full, nothing
        ready) are Failed events too, so submitting never raises.
        """
        ...

    def stop_choice(self, request_id: RequestId, choice_idx: int) -> None:
        """The front end has seen a stop string: end this choice. Unknown or ended: ignored."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """The rest is not wanted. Idempotent; unknown ids are ignored."""
        ...

    def readiness(self) -> Readiness: ...

    def state(self) -> ClusterState: ...

    def recent(self) -> RecentView:
        """Latencies, rates and transfers of the last minute."""
        ...

    def request_record(self, request_id: RequestId) -> JsonObject | None:
        """The route, its costs and the timings of a live or remembered request; None when unknown."""
        ...

    def request_records(self, limit: int) -> Sequence[JsonObject]:
        """The newest `limit` records, newest first."""
        ...

    def drain_worker(self, worker_id: str, grace_s: float) -> bool:
        """Tell a worker to refuse new work and finish what it has. False when there is no such worker."""
        ...
