"""Router <-> worker messages as values: `proto/pdserve/worker/v1` without the encoding. Pure: no IO.

The cores speak these; `common/wire/convert.py` alone knows both forms.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.values.ids import AttemptId, RouterId, WorkerRef
from common.values.request import ChunkTiming, Fingerprint, KvChunkTiming, PromptLogprobs, TokenEvent, Work


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Role":
        """The role that a worker of this one can change to."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


# ---- router -> worker -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterHello:
    router_id: RouterId


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask a decode worker for room. It may keep the prefill for itself when few tokens are missing."""

    work: Work
    local_prefill_max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Ask a prefill worker to compute `work` and ship KV from `first_missing_token` on."""

    work: Work
    prefill_try: int
    decode_worker: WorkerRef
    decode_address: str
    first_missing_token: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the attempt, or only some of its choices (`choices` empty = all). Unknown attempts are ignored."""

    attempt_id: AttemptId
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    grace_s: float


RouterMessage = RouterHello | Reserve | Prefill | Cancel | Drain

# ---- worker -> router -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One of the processes that run a worker's model together."""

    pid: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is. First message on a stream; never changes during an incarnation."""

    ref: WorkerRef
    role: Role
    model_name: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    pid: int
    fingerprint: Fingerprint
    handoff_address: str = ""  # decode workers: where prefill workers reach them
    device: str = "cpu"
    ranks: tuple[RankProcess, ...] = ()  # the first is the worker's own process; () = not said


@dataclass(frozen=True, slots=True)
class Granted:
    """Room is reserved. `first_missing_token` < len(token_ids) always: the last token is always computed.

    `is_local`: the decode worker computes the missing tokens itself; no prefill worker is needed.
    """

    attempt_id: AttemptId
    first_missing_token: int
    is_local: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker will not take the attempt: for now (`is_retryable`), or never. `prefill_try`: see AttemptFailed."""

    attempt_id: AttemptId
    reason: str
    is_retryable: bool
    prefill_try: int | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of the next prompt tokens, as they are computed; all are sent before the attempt's first tokens.

    `prefill_try`: see AttemptFailed.
    """

    attempt_id: AttemptId
    scores: PromptLogprobs
    prefill_try: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token of each choice, at once, before the KV has arrived.

    Nothing follows but, when the link is lost under the transfer, an AttemptFailed.
    """

    attempt_id: AttemptId
    prefill_try: int
    tokens: tuple[TokenEvent, ...]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    chunks: tuple[ChunkTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptTokens:
    """`num_drafts`: guesses that were verified for it meanwhile; those that were right are among `tokens`."""

    attempt_id: AttemptId
    tokens: tuple[TokenEvent, ...]
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Everything one decode step made for one router: one message per step, never one per token."""

    attempts: tuple[AttemptTokens, ...]


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """How the KV came in; sent by the decode worker just before the attempt's first tokens."""

    attempt_id: AttemptId
    num_bytes: int
    num_chunks: int
    transfer_s: float
    exposed_s: float
    decode_queue_s: float
    num_cached_tokens: int
    is_local: bool
    local_prefill_s: float = 0.0
    chunks: tuple[KvChunkTiming, ...] = ()  # in order of arrival; of very many only the last
    transport: str = ""
    link_bytes_per_s: float = 0.0  # of its sends, lately; 0: none has ended yet


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A transfer ended early. The grant stands: another prefill worker may fill the same blocks."""

    attempt_id: AttemptId
    prefill_try: int
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt is over on this worker; what it held is free, or will be when a running step or transfer ends.

    A prefill worker names the try it speaks of, so that its answer cannot end a later try; decode workers leave
    `prefill_try` None.
    """

    attempt_id: AttemptId
    reason: str
    is_retryable: bool
    prefill_try: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    state: WorkerState = WorkerState.READY
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_uncached_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_free: int = 0
    kv_blocks_held: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    num_preemptions: int = 0
    num_held_attempts: int = field(default=0)
    ranks_silent_s: tuple[float, ...] = ()  # per rank; () where all of the model runs in one process


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks of one attempt, for an audit. Blocks that attempts share count with each. `time_left_s` < 0: overdue."""

    attempt_id: AttemptId
    phase: str
    num_blocks: int
    age_s: float
    time_left_s: float
    prefill_try: int | None = None


WorkerMessage = (
    WorkerInfo
    | Granted
    | Refused
    | PromptScored
    | FirstTokens
    | TokenBatch
    | HandoffReport
    | TransferFailed
    | AttemptFailed
    | WorkerStats
)
