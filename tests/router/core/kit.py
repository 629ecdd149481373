"""Builders for router tests: workers, requests, and a driver that feeds a core and sorts what comes out."""

from collections.abc import Sequence
from dataclasses import replace

from common.values.errors import PdserveError
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import (
    AttemptTokens,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    RankProcess,
    Reserve,
    Role,
    RouterMessage,
    TokenBatch,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from common.values.request import ChunkTiming, Fingerprint, FinishReason, SampledToken, SamplingParams, TokenEvent
from router.core.core import RouterCore
from router.core.events import (
    Deliver,
    LookupPrefix,
    NoteHandoff,
    PrefixFound,
    RequestSubmitted,
    RouterEffect,
    RouterEvent,
    SendToWorker,
    WorkerConnected,
    WorkerLost,
    WorkerMessageReceived,
)
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, GenerationRequest, Tokens
from router.core.router_limits import RouterLimits

FINGERPRINT = Fingerprint((("dtype", "float32"), ("model", "tiny")))
BLOCK_SIZE = 16
NUM_BLOCKS = 64


def worker_info(
    worker_id: str, incarnation: str = "1", *, fingerprint: Fingerprint = FINGERPRINT, num_blocks: int = NUM_BLOCKS
) -> WorkerInfo:
    """A worker whose id starts with its role's letter: p0, d1."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    return WorkerInfo(
        ref=WorkerRef(worker_id, incarnation),
        role=role,
        model_name="tiny",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=8,
        pid=1,
        ranks=(RankProcess(1), RankProcess(2)),
        fingerprint=fingerprint,
        handoff_address=f"{worker_id}:9" if role is Role.DECODE else "",
    )


def ref(worker_id: str, incarnation: str = "1") -> WorkerRef:
    return WorkerRef(worker_id, incarnation)


def request(request_id: str = "r", num_tokens: int = 64, **fields: object) -> GenerationRequest:
    """A request; `max_tokens` and everything of GenerationRequest may be given."""
    max_tokens = fields.pop("max_tokens", 4)
    assert isinstance(max_tokens, int)
    base = GenerationRequest(
        request_id=RequestId(request_id),
        token_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(seed=7, max_tokens=max_tokens),
        deadline_s=60.0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def token(position: int, token_id: int = 0, *, choice: int = 0, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(choice, position, SampledToken(token_id or 100 * (choice + 1) + position), finish)


class Driver:
    """A core with a clock. Checks the invariants after every event; answers look-ups at once from `cached_blocks`."""

    def __init__(self, *worker_ids: str, limits: RouterLimits | None = None) -> None:
        self.core = RouterCore(limits or RouterLimits())
        self.now_s = 100.0
        self.cached_blocks: dict[str, int] = {}
        self.answers_lookups = True
        self.delivered: dict[str, list[GenerationEvent]] = {}
        self.handoffs: list[NoteHandoff] = []
        self.other_effects: list[RouterEffect] = []
        self._sent: list[SendToWorker] = []
        for worker_id in worker_ids:
            self.connect(worker_info(worker_id))

    def feed(self, event: RouterEvent) -> None:
        effects = self.core.handle(event, self.now_s)
        self.core.check_invariants()
        self._sort(effects)

    def advance(self, seconds: float, silent: str = "") -> None:
        """Let time pass, with every deadline noticed on time. All workers but `silent` are heard every second."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._advance_to(min(end_s, self.now_s + 1.0))
            for worker in self.core.workers:
                if worker.ref.worker_id != silent:
                    self.feed(WorkerMessageReceived(worker.ref, worker.info))

    def _advance_to(self, end_s: float) -> None:
        while (deadline_s := self.core.next_deadline_s()) is not None and deadline_s <= end_s:
            self.now_s = max(self.now_s, deadline_s)
            self._sort(self.core.handle_deadline(self.now_s))
            self.core.check_invariants()
        self.now_s = end_s

    def stall(self, seconds: float) -> None:
        """The router itself stands still for so long, then notices its deadlines."""
        self.now_s += seconds
        self._sort(self.core.handle_deadline(self.now_s))
        self.core.check_invariants()

    def connect(self, info: WorkerInfo) -> None:
        self.feed(WorkerConnected(info, f"{info.ref.worker_id}:1"))

    def say(self, worker_id: str, message: WorkerMessage, incarnation: str = "1") -> None:
        self.feed(WorkerMessageReceived(ref(worker_id, incarnation), message))

    def stats(self, worker_id: str, **fields: object) -> None:
        """A report of a worker that is idle except for what `fields` say."""
        self.say(worker_id, replace(WorkerStats(kv_blocks_free=NUM_BLOCKS), **fields))  # type: ignore[arg-type]

    def submit(self, spec: GenerationRequest) -> None:
        self.feed(RequestSubmitted(spec))

    def take(self, worker_id: str | None = None) -> list[RouterMessage]:
        """Messages sent to a worker (or to any) since the last take, in order."""
        taken = [s.message for s in self._sent if worker_id in (None, s.worker.worker_id)]
        self._sent = [s for s in self._sent if worker_id not in (None, s.worker.worker_id)]
        return taken

    def take_one(self, worker_id: str) -> RouterMessage:
        messages = self.take(worker_id)
        assert len(messages) == 1, messages
        return messages[0]

    # ---- steps of a normal life ---------------------------------------------------------------------

    def grant(self, worker_id: str, *, first_missing: int = 0, is_local: bool = False) -> AttemptId:
        """The decode worker takes what it was just asked for."""
        reserve = self.take_one(worker_id)
        assert isinstance(reserve, Reserve), reserve
        self.say(worker_id, Granted(reserve.work.attempt_id, first_missing, is_local))
        return reserve.work.attempt_id

    def first_tokens(
        self, worker_id: str, *tokens: TokenEvent, num_cached: int = 0, queue_s: float = 0.0, prefill_s: float = 0.0
    ) -> Prefill:
        """The prefill worker computes what it was just asked for."""
        prefill = self.take_one(worker_id)
        assert isinstance(prefill, Prefill), prefill
        position = prefill.work.num_output_tokens
        answer = tokens or tuple(token(position, choice=choice) for choice in prefill.work.choices)
        chunks = (ChunkTiming(queue_s, queue_s + prefill_s, len(prefill.work.token_ids) - num_cached),)
        attempt_id, prefill_try = prefill.work.attempt_id, prefill.prefill_try
        self.say(worker_id, FirstTokens(attempt_id, prefill_try, answer, queue_s, prefill_s, num_cached, chunks))
        return prefill

    def report(self, worker_id: str, attempt_id: AttemptId, **fields: object) -> None:
        base = HandoffReport(attempt_id, 4096, 2, 0.2, 0.05, 0.01, 0, is_local=False)
        self.say(worker_id, replace(base, **fields))  # type: ignore[arg-type]

    def tokens(self, worker_id: str, attempt_id: AttemptId, *tokens: TokenEvent) -> None:
        self.say(worker_id, TokenBatch((AttemptTokens(attempt_id, tokens),)))

    def to_decoding(self, spec: GenerationRequest, prefill: str = "p0", decode: str = "d0") -> AttemptId:
        """Submit a request and bring it to where the decode worker has all KV. Position 0 is delivered."""
        self.submit(spec)
        attempt_id = self.grant(decode)
        self.first_tokens(prefill)
        self.report(decode, attempt_id)
        return attempt_id

    # ---- what the client got ------------------------------------------------------------------------

    def events(self, request_id: str = "r") -> list[GenerationEvent]:
        return self.delivered.get(request_id, [])

    def token_ids(self, request_id: str = "r", choice: int = 0) -> list[int]:
        """Delivered tokens of a choice; asserts that the positions have no gap and no repeat."""
        events = [
            t for e in self.events(request_id) if isinstance(e, Tokens) for t in e.tokens if t.choice_idx == choice
        ]
        assert [event.position for event in events] == list(range(len(events)))
        return [event.token.token_id for event in events]

    def accepted(self, request_id: str = "r") -> Accepted:
        found = [event for event in self.events(request_id) if isinstance(event, Accepted)]
        assert len(found) == 1, found
        return found[0]

    def finished(self, request_id: str = "r") -> Finished:
        last = self.events(request_id)[-1]
        assert isinstance(last, Finished), last
        return last

    def error(self, request_id: str = "r") -> PdserveError:
        last = self.events(request_id)[-1]
        assert isinstance(last, Failed), last
        return last.error

    def has_ended(self, request_id: str = "r") -> bool:
        return any(isinstance(event, Finished | Failed) for event in self.events(request_id))

    def assert_nothing_left(self) -> None:
        """No request, no load on any worker, no timer but the workers' silence."""
        assert self.core.request_ids == ()
        assert self.core.num_queued == 0
        assert all(not worker.shares for worker in self.core.workers)

    def _sort(self, effects: Sequence[RouterEffect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(request_id, event):
                    events = self.delivered.setdefault(request_id, [])
                    assert not any(isinstance(e, Finished | Failed) for e in events), "answered twice"
                    events.append(event)
                case SendToWorker():
                    self._sent.append(effect)
                case LookupPrefix():
                    if self.answers_lookups:
                        self._answer(effect)
                case NoteHandoff():
                    self.handoffs.append(effect)
                case _:
                    self.other_effects.append(effect)

    def _answer(self, lookup: LookupPrefix) -> None:
        found = tuple((w, self.cached_blocks[w.worker_id]) for w in lookup.workers if w.worker_id in self.cached_blocks)
        self.feed(PrefixFound(lookup.attempt_id, lookup.key, found))


def lose(driver: Driver, worker_id: str, incarnation: str = "1") -> None:
    driver.feed(WorkerLost(ref(worker_id, incarnation), "stream ended"))
