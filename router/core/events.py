"""Events and effects of the router core. Pure: no IO.

A worker is known by its reference, incarnation included: what an earlier life of it said never matches.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from common.values.errors import PdserveError
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import Role, RouterMessage, WorkerInfo, WorkerMessage
from common.values.request import Fingerprint
from router.core.generation import GenerationEvent, GenerationRequest


class Lost(StrEnum):
    """What a retry replaces."""

    PREFILL_WORKER = "prefill_worker"
    DECODE_WORKER = "decode_worker"
    TRANSFER = "transfer"


class PrefixKey(NamedTuple):
    """Workers with equal keys hash a prompt's blocks alike."""

    fingerprint: Fingerprint
    block_size: int


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """`first_attempt` numbers the request's attempts from a place of its own.

    Clients choose request ids and use them again, at this router or another: what a worker still says about an
    earlier request of the same id must not match this one.
    """

    request: GenerationRequest
    first_attempt: int = 0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Somebody does not want the rest: the client left, or the router shuts down. Unknown requests are ignored."""

    request_id: RequestId
    error: PdserveError


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """The front end has seen a stop string: the choice has ended. Unknown or ended: ignored."""

    request_id: RequestId
    choice_idx: int


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """Answer to LookupPrefix: leading blocks per worker; a worker without any is absent."""

    attempt_id: AttemptId
    key: PrefixKey
    num_cached_blocks: tuple[tuple[WorkerRef, int], ...]


@dataclass(frozen=True, slots=True)
class RequestTimedOut:
    """The request's deadline."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AttemptTimedOut:
    """What the attempt's phase waits for has not come."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A stream is up and the worker has said who it is."""

    info: WorkerInfo
    address: str


@dataclass(frozen=True, slots=True)
class WorkerMessageReceived:
    worker: WorkerRef
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream ended; nothing more comes from it."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersListed:
    """The registry has answered: these lives of workers hold a lease, or are still being connected to.

    `expected`: roles of which a worker is being started or loads.
    """

    workers: frozenset[WorkerRef]
    expected: frozenset[Role] = frozenset()


@dataclass(frozen=True, slots=True)
class DrainRequested:
    worker_id: str
    grace_s: float


RouterEvent = (
    RequestSubmitted
    | EndRequested
    | ChoiceStopped
    | PrefixFound
    | WorkerConnected
    | WorkerMessageReceived
    | WorkerLost
    | WorkersListed
    | DrainRequested
)


@dataclass(frozen=True, slots=True)
class LookupPrefix:
    """Ask the index how much of `token_ids` each of `workers` holds; ends in PrefixFound."""

    attempt_id: AttemptId
    key: PrefixKey
    token_ids: tuple[int, ...]
    cache_salt: bytes
    adapter: str  # its digest
    workers: tuple[WorkerRef, ...]


@dataclass(frozen=True, slots=True)
class SendToWorker:
    worker: WorkerRef
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class DropWorker:
    """Close the stream of a worker that does not count (any more). `is_final`: a later life of it has come."""

    worker: WorkerRef
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand an event to the request's front end. Finished and Failed are the last, and exactly one comes."""

    request_id: RequestId
    event: GenerationEvent


@dataclass(frozen=True, slots=True)
class NoteRetry:
    """For logs and metrics: a worker or a transfer was replaced within a request. `lost` is one of few words."""

    request_id: RequestId
    lost: Lost
    reason: str


@dataclass(frozen=True, slots=True)
class NoteStaleHit:
    """For logs and metrics: the index promised more cached tokens than the worker had."""

    worker: WorkerRef
    num_promised_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class NoteHandoff:
    """For people to look at: a prompt's KV has gone from one worker to another."""

    prefill: WorkerRef
    decode: WorkerRef
    num_bytes: int


RouterEffect = LookupPrefix | SendToWorker | DropWorker | Deliver | NoteRetry | NoteStaleHit | NoteHandoff
