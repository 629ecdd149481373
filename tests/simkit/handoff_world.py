"""Every interleaving of a handoff: the production sender and receiver cores between stand-ins for all around them.

Real: `SenderCore`, `ReceiverCore`, chunk planning and coverage. Stand-ins: the compute that reports layers, the pack
thread, the two ordered control streams, the link (a send completes only when its receive was posted), the writes.
KV is a name: the cell (layer, token) of a try holds "try", so a block filled by the wrong transfer names it.

Faults (bounded by `Budget`): the session breaks (each side hears it in its own time, what was under way is lost), a
chunk arrives corrupt, the receiver freezes, either worker wants to cancel, time passes a deadline. A crash is a break
after which one side never speaks again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.ids import AttemptId, RequestId, TransferId, WorkerRef
from common.request import SampledToken
from kvtransfer.events import (
    AcknowledgedByPeer,
    AttemptReleased,
    CancelAnnounced,
    CancelledByPeer,
    Chunk,
    ChunkAnnounced,
    ChunkPacked,
    ChunkReceived,
    ChunkSent,
    ChunkWritten,
    ConnectPeer,
    DiscardChunk,
    DropPeer,
    ExpectationWithdrawn,
    FinishAnnounced,
    FirstToken,
    FirstTokensSampled,
    Outcome,
    PeerLost,
    PeerReady,
    PostReceive,
    ReceiverEffect,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    SendChunk,
    SenderEffect,
    SenderEvent,
    SendFinished,
    TokensComputed,
    TransferCancelRequested,
    TransferEnded,
    TransferExpected,
    TransferFailedLocally,
    TransferReceived,
    TransferStarted,
    WriteChunk,
)
from kvtransfer.plan import ChunkPlanner
from kvtransfer.receiver import ReceiverCore
from kvtransfer.sender import SenderCore

NUM_LAYERS, NUM_TOKENS = 2, 2
TOKENS = (FirstToken(0, SampledToken(7)),)
DECODE = WorkerRef("d", "1")
DEADLINE_S, LINK_TIMEOUT_S = 100.0, 10.0
# What the compute reports, in order: two prefill chunks of one token, layer by layer.
PROGRESS = ((1, 1), (2, 1), (1, 2), (2, 2))


class Silent:
    """A `History` that remembers nothing: what was is not part of what is."""

    def note(self, key: object, event: object) -> None: ...

    def invalid(self, key: object, problem: str) -> AssertionError:
        return AssertionError(f"{key}: {problem}")


@dataclass(slots=True)
class Budget:
    """How often each fault may still happen."""

    breaks: int = 0
    corruptions: int = 0
    freezes: int = 0
    sender_cancels: int = 0
    receiver_cancels: int = 0
    deadlines: int = 0


@dataclass(slots=True)
class Session:
    """Control stream and link of one sender, as the two shells see them."""

    is_ready: bool = False  # to the sender
    is_known: bool = False  # to the receiver
    is_broken: bool = False
    is_predecessor_known: bool = False  # the receiver has not heard that an older session broke
    up: list[object] = field(default_factory=list)
    down: list[object] = field(default_factory=list)
    packing: list[SendChunk] = field(default_factory=list)
    sent: list[SendChunk] = field(default_factory=list)  # on the link, not taken
    taken: list[SendChunk] = field(default_factory=list)  # taken, the sender does not know yet
    posted: list[PostReceive] = field(default_factory=list)


@dataclass(slots=True)
class Try:
    """The prefill of one try: how far compute has come and whether its transfer has ended."""

    sender: str
    num_computed: int = 0
    outcome: Outcome | None = None


class HandoffWorld:
    """One or two attempts, one or two prefill workers, one decode worker."""

    def __init__(self, budget: Budget, num_attempts: int = 1, num_senders: int = 1, num_tries: int = 1) -> None:
        planner = ChunkPlanner(NUM_LAYERS, 1, min_chunk_bytes=1, header_bytes=0)
        self.budget = budget
        self.num_tries = num_tries
        self.senders = {f"p{idx}": SenderCore(planner, 2, LINK_TIMEOUT_S) for idx in range(num_senders)}
        self.receiver = ReceiverCore(planner, 2, LINK_TIMEOUT_S)
        for core in (*self.senders.values(), self.receiver):
            core._history = Silent()  # type: ignore[assignment]
        self.sessions: dict[str, Session] = {}
        self.tries: dict[TransferId, Try] = {}
        self.cells: dict[AttemptId, dict[tuple[int, int], int]] = {}
        self.staged: dict[tuple[TransferId, int], Chunk] = {}
        self.writing: list[WriteChunk] = []
        self.ended: dict[AttemptId, str] = {}  # at the receiver: received or released
        self.now_s = 0.0
        self.is_frozen = False
        self.rows: Counter[tuple[str, str]] = Counter()
        for idx in range(num_attempts):
            attempt_id = AttemptId(RequestId(f"r{idx}"), 0)
            self.cells[attempt_id] = {}
            table = (idx,)
            self._receive(TransferExpected(attempt_id, 0, NUM_TOKENS, table, len(TOKENS)))
            self._start(TransferId(attempt_id, 0), f"p{idx % num_senders}")

    # ---- what may happen ----------------------------------------------------------------------------

    def choices(self) -> Sequence[str]:
        choices = [f"compute {index}" for index, entry in enumerate(self.tries.values()) if self._can_compute(entry)]
        for name, session in self.sessions.items():
            choices += [f"{action} {name}" for action in self._session_actions(session)]
        if self.writing and not self.is_frozen:
            choices.append("write")
        choices += [f"retry {index}" for index, key in enumerate(self.cells) if self._can_retry(key)]
        return choices + self._faults(is_stuck=not choices)

    def _session_actions(self, session: Session) -> list[str]:
        if session.is_broken:
            actions = ["sender_hears_loss"] if session.is_ready or not session.is_known else []
            return actions + (["receiver_hears_loss"] if session.is_known and not self.is_frozen else [])
        actions = [] if session.is_ready else ["connect"]
        if session.is_predecessor_known and not self.is_frozen:
            actions.append("receiver_hears_old_loss")
        actions += ["pack"] if session.packing else []
        actions += ["know"] if session.taken else []
        actions += ["down"] if session.down and session.is_ready else []
        if not self.is_frozen:
            actions += ["up"] if session.up else []
            actions += ["move"] if session.sent and session.posted else []
        return actions

    def _can_compute(self, entry: Try) -> bool:
        return entry.outcome is None and entry.num_computed <= len(PROGRESS)

    def _can_retry(self, attempt_id: AttemptId) -> bool:
        tries = [entry for key, entry in self.tries.items() if key.attempt_id == attempt_id]
        is_over = tries[-1].outcome not in (None, Outcome.DONE)
        return is_over and len(tries) < self.num_tries and attempt_id not in self.ended

    def _faults(self, *, is_stuck: bool) -> list[str]:
        budget = self.budget
        faults = [f"!break {name}" for name, s in self.sessions.items() if budget.breaks and not s.is_broken]
        if budget.corruptions and not self.is_frozen:
            faults += [
                f"!corrupt {name}" for name, s in self.sessions.items() if s.sent and s.posted and not s.is_broken
            ]
        if budget.freezes and not self.is_frozen:
            faults.append("!freeze")
        if budget.sender_cancels:
            faults += [f"!cancel_prefill {i}" for i, entry in enumerate(self.tries.values()) if entry.outcome is None]
        if budget.receiver_cancels:
            faults += [f"!withdraw {i}" for i, key in enumerate(self.cells) if key not in self.ended]
        if budget.deadlines and self._next_deadline_s() is not None:
            faults.append("!deadline")
        # When nothing else can happen, time passes: that is no fault, it is what deadlines are for.
        if is_stuck and self._next_deadline_s() is not None:
            faults.append("deadline")
        return faults

    # ---- letting it happen --------------------------------------------------------------------------

    def apply(self, choice: str) -> None:
        action, _, argument = choice.lstrip("!").partition(" ")
        is_fault = choice.startswith("!")
        getattr(self, f"_do_{action}")(argument) if argument else getattr(self, f"_do_{action}")()
        if is_fault:
            self._spend(action)

    def _spend(self, action: str) -> None:
        name = {
            "break": "breaks",
            "corrupt": "corruptions",
            "freeze": "freezes",
            "cancel_prefill": "sender_cancels",
            "withdraw": "receiver_cancels",
            "deadline": "deadlines",
        }[action]
        setattr(self.budget, name, getattr(self.budget, name) - 1)

    def _do_compute(self, index: str) -> None:
        transfer_id, entry = list(self.tries.items())[int(index)]
        if entry.num_computed < len(PROGRESS):
            event: SenderEvent = TokensComputed(transfer_id, *PROGRESS[entry.num_computed])
        else:
            event = FirstTokensSampled(transfer_id, TOKENS)
        entry.num_computed += 1
        self._send(entry.sender, event)

    def _do_connect(self, name: str) -> None:
        session = self.sessions[name]
        if session.is_predecessor_known:  # the shell ends a peer's old session before it takes a new one
            self._do_receiver_hears_old_loss(name)
        session.is_ready = session.is_known = True
        self._receive(PeerReady(_ref(name)))
        self._send(name, PeerReady(DECODE))

    def _do_pack(self, name: str) -> None:
        session = self.sessions[name]
        effect = session.packing.pop(0)
        session.sent.append(effect)
        self._send(name, ChunkPacked(effect.transfer_id, effect.chunk.seq))

    def _do_know(self, name: str) -> None:
        effect = self.sessions[name].taken.pop(0)
        self._send(name, ChunkSent(effect.transfer_id, effect.chunk.seq))

    def _do_up(self, name: str) -> None:
        message = self.sessions[name].up.pop(0)
        self._receive(message)  # type: ignore[arg-type]

    def _do_down(self, name: str) -> None:
        self._send(name, self.sessions[name].down.pop(0))  # type: ignore[arg-type]

    def _do_move(self, name: str, error: str | None = None) -> None:
        session = self.sessions[name]
        sent, posted = session.sent.pop(0), session.posted.pop(0)
        assert (sent.transfer_id, sent.chunk) == (posted.transfer_id, posted.chunk), "the link is out of step"
        session.taken.append(sent)
        self.staged[(sent.transfer_id, sent.chunk.seq)] = sent.chunk
        self._receive(ChunkReceived(_ref(name), sent.transfer_id, sent.chunk.seq, error))

    def _do_corrupt(self, name: str) -> None:
        self._do_move(name, "digest differs")

    def _do_write(self) -> None:
        effect = self.writing.pop(0)
        attempt_id, chunk = effect.transfer_id.attempt_id, effect.chunk
        assert attempt_id not in self.ended, f"a write into blocks of {attempt_id} after it was {self.ended}"
        for layer in range(chunk.layer_start, chunk.layer_end):
            for token in range(chunk.token_start, chunk.token_end):
                self.cells[attempt_id][(layer, token)] = effect.transfer_id.prefill_try
        del self.staged[(effect.transfer_id, chunk.seq)]
        self._receive(ChunkWritten(effect.transfer_id, chunk.seq))

    def _do_retry(self, index: str) -> None:
        attempt_id = list(self.cells)[int(index)]
        number = sum(key.attempt_id == attempt_id for key in self.tries)
        senders = list(self.senders)
        self._start(TransferId(attempt_id, number), senders[number % len(senders)])

    def _do_break(self, name: str) -> None:
        session = self.sessions[name]
        session.is_broken = True
        # What was packed is gone and what was being packed has ended: the shell reports the loss after that.
        session.up, session.down, session.sent, session.taken = [], [], [], []

    def _do_sender_hears_loss(self, name: str) -> None:
        session = self.sessions[name]
        session.packing.clear()
        session.is_ready = False
        self._forget_if_over(name, session)
        self._send(name, PeerLost(DECODE, "broken"))

    def _do_receiver_hears_loss(self, name: str) -> None:
        session = self.sessions[name]
        session.posted.clear()
        session.is_known = False
        self._forget_if_over(name, session)
        self._receive(PeerLost(_ref(name), "broken"))

    def _do_receiver_hears_old_loss(self, name: str) -> None:
        self.sessions[name].is_predecessor_known = False
        self._receive(PeerLost(_ref(name), "broken"))

    def _do_freeze(self) -> None:
        self.is_frozen = True

    def _do_cancel_prefill(self, index: str) -> None:
        transfer_id, entry = list(self.tries.items())[int(index)]
        self._send(entry.sender, TransferCancelRequested(transfer_id, "client gone"))

    def _do_withdraw(self, index: str) -> None:
        self._receive(ExpectationWithdrawn(list(self.cells)[int(index)], "client gone"))

    def _do_deadline(self) -> None:
        deadline_s = self._next_deadline_s()
        assert deadline_s is not None
        self.now_s = max(self.now_s, deadline_s)
        for name, sender in self.senders.items():
            self._perform_sender(name, sender.handle_deadline(self.now_s))
        if not self.is_frozen:
            self._perform_receiver(self.receiver.handle_deadline(self.now_s))

    # ---- performing effects -------------------------------------------------------------------------

    def _start(self, transfer_id: TransferId, name: str) -> None:
        self.tries[transfer_id] = Try(name)
        event = TransferStarted(transfer_id, DECODE, "", 0, NUM_TOKENS, (0,), self.now_s + DEADLINE_S)
        self._send(name, event)

    def _send(self, name: str, event: SenderEvent) -> None:
        self._perform_sender(name, self.senders[name].handle(event, self.now_s))

    def _receive(self, event: ReceiverEvent) -> None:
        self._perform_receiver(self.receiver.handle(event, self.now_s))

    def _perform_sender(self, name: str, effects: Sequence[SenderEffect]) -> None:
        for effect in effects:
            self._perform_sender_effect(name, effect)

    def _perform_sender_effect(self, name: str, effect: SenderEffect) -> None:
        session, ref = self.sessions.get(name), _ref(name)
        match effect:
            case ConnectPeer():
                is_known = session is not None and (session.is_known or session.is_predecessor_known)
                self.sessions[name] = Session(is_predecessor_known=is_known)
            case TransferEnded(transfer_id, outcome):
                self._end_transfer(transfer_id, outcome)
            case SendChunk(_, transfer_id, chunk):
                assert self.tries[transfer_id].outcome is None, f"{transfer_id} is read after it ended"
                if session is not None:
                    session.packing.append(effect)
                    session.up += [] if session.is_broken else [ChunkAnnounced(ref, transfer_id, chunk)]
            case SendFinished(_, transfer_id, num_chunks, tokens):
                self._up(session, FinishAnnounced(ref, transfer_id, num_chunks, tokens))
            case SendCancel(_, transfer_id, reason):
                self._up(session, CancelAnnounced(ref, transfer_id, reason))
            case DropPeer():
                self._do_break(name)

    def _up(self, session: Session | None, message: object) -> None:
        if session is not None and not session.is_broken:
            session.up.append(message)

    def _end_transfer(self, transfer_id: TransferId, outcome: Outcome) -> None:
        entry = self.tries[transfer_id]
        assert entry.outcome is None, f"{transfer_id} ended twice"
        session = self.sessions.get(entry.sender)
        packing = [effect for effect in session.packing if effect.transfer_id == transfer_id] if session else []
        assert not packing, f"{transfer_id} ended while a pack reads its blocks"
        entry.outcome = outcome

    def _perform_receiver(self, effects: Sequence[ReceiverEffect]) -> None:
        for effect in effects:
            self._perform_receiver_effect(effect)

    def _perform_receiver_effect(self, effect: ReceiverEffect) -> None:  # noqa: C901 (one case per effect)
        match effect:
            case PostReceive(peer):
                if (session := self._session_of_receiver(peer)) is not None:
                    session.posted.append(effect)
            case WriteChunk(_, transfer_id):
                assert transfer_id.attempt_id not in self.ended, f"{transfer_id} is written after its end"
                self.writing.append(effect)
            case DiscardChunk(_, transfer_id, seq):
                del self.staged[(transfer_id, seq)]
            case SendAcknowledged(peer, transfer_id):
                self._down(peer, AcknowledgedByPeer(transfer_id))
            case SendCancel(peer, transfer_id, reason):
                self._down(peer, CancelledByPeer(transfer_id, reason))
            case DropPeer(peer):
                if self._session_of_receiver(peer) is not None:
                    self._do_break(peer.worker_id)
            case TransferReceived(transfer_id):
                self._end_attempt(transfer_id.attempt_id, "received")
                self._check_cells(transfer_id)
            case AttemptReleased(attempt_id):
                self._end_attempt(attempt_id, "released")
            case TransferFailedLocally():
                pass

    def _down(self, peer: WorkerRef, message: object) -> None:
        if (session := self._session_of_receiver(peer)) is not None:
            session.down.append(message)

    def _session_of_receiver(self, peer: WorkerRef) -> Session | None:
        """Where the receiver's effects go: not into a session that it has not heard of."""
        session = self.sessions.get(peer.worker_id)
        return session if session is not None and session.is_known and not session.is_broken else None

    def _end_attempt(self, attempt_id: AttemptId, how: str) -> None:
        assert attempt_id not in self.ended, f"{attempt_id} {how} after it was {self.ended[attempt_id]}"
        writing = [effect for effect in self.writing if effect.transfer_id.attempt_id == attempt_id]
        assert not writing, f"{attempt_id} {how} while a write touches its blocks"
        self.ended[attempt_id] = how

    def _check_cells(self, transfer_id: TransferId) -> None:
        expected = {(layer, token) for layer in range(NUM_LAYERS) for token in range(NUM_TOKENS)}
        cells = self.cells[transfer_id.attempt_id]
        assert cells.keys() == expected, f"{transfer_id} received without {expected - cells.keys()}"
        assert set(cells.values()) == {transfer_id.prefill_try}, f"{transfer_id} received with KV of {cells}"

    def _forget_if_over(self, name: str, session: Session) -> None:
        if not session.is_ready and not session.is_known:
            del self.sessions[name]

    # ---- properties ---------------------------------------------------------------------------------

    def check(self) -> None:
        for core in (*self.senders.values(), self.receiver):
            core.check_invariants()
        live = {entry.transfer_id for sender in self.senders.values() for entry in sender._transfers.values()}
        assert live == {key for key, entry in self.tries.items() if entry.outcome is None}

    def check_quiet(self) -> None:
        """Nothing is left anywhere, whatever happened; without faults everything was received."""
        assert all(entry.outcome is not None for entry in self.tries.values()), "a transfer never ended"
        assert not any(session.packing for session in self.sessions.values())
        if self.is_frozen:
            return
        assert not self.staged, f"staging buffers leaked: {self.staged}"
        assert not self.writing
        for attempt_id in self.cells:
            outcomes = [entry.outcome for key, entry in self.tries.items() if key.attempt_id == attempt_id]
            if Outcome.DONE in outcomes:
                assert self.ended.get(attempt_id) == "received", f"{attempt_id}: acknowledged and not received"
            if attempt_id not in self.ended:
                assert len(outcomes) == self.num_tries, f"{attempt_id} waits for nobody"

    def _next_deadline_s(self) -> float | None:
        cores = (*self.senders.values(), *(() if self.is_frozen else (self.receiver,)))
        return min((d for core in cores if (d := core.next_deadline_s()) is not None), default=None)


def _ref(name: str) -> WorkerRef:
    return WorkerRef(name, "1")
