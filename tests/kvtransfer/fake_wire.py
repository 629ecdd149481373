"""Both handoff cores joined by a wire whose every step is chosen by a seed: delays, cancels, errors, lost links.

It behaves as the real shells promise to: announcements and payloads in order, packs in order and none after the
link's death, PeerLost last, WriteChunk always ends. It checks what cores cannot see: that payloads meet the
receives they were announced for, and that nothing touches the blocks of a transfer that has ended.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.values.ids import AttemptId, RequestId, TransferId, WorkerRef
from common.values.request import SampledToken
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AcknowledgedByPeer,
    AttemptReleased,
    CancelAnnounced,
    CancelledByPeer,
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
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.sender.core import SenderCore
from tests.caches import row_spec

FIRST = (FirstToken(0, SampledToken(1)),)
NUM_TOKENS, NUM_LAYERS = 24, 3
PLANNER = ChunkPlanner(row_spec(NUM_LAYERS, 10), min_chunk_bytes=60)
WINDOW_BYTES, LINK_TIMEOUT_S, DEADLINE_S = 500, 5.0, 40.0
RECEIVER = WorkerRef("d", "0")

Action = Callable[[], None]


@dataclass
class Line:
    """One life of the control stream and link of a pair."""

    sender: "Sender"
    is_up: bool = False
    is_cut: bool = False
    to_receiver: deque[ReceiverEvent] = field(default_factory=deque)
    to_sender: deque[SenderEvent] = field(default_factory=deque)
    packs: deque[SendChunk] = field(default_factory=deque)
    payloads: deque[SendChunk] = field(default_factory=deque)
    receives: deque[PostReceive] = field(default_factory=deque)
    sender_knows: bool = False
    receiver_knows: bool = False


@dataclass
class Sender:
    """A sender core with its wishes: what it still has to compute."""

    ref: WorkerRef
    core: SenderCore = field(default_factory=lambda: SenderCore(PLANNER, WINDOW_BYTES, LINK_TIMEOUT_S))
    line: Line | None = None
    computing: dict[TransferId, tuple[int, int]] = field(default_factory=dict)
    live: set[TransferId] = field(default_factory=set)


class Wire:
    """One receiver, several senders. `step` does one random thing; `settle` heals and runs everything out."""

    def __init__(self, seed: int, num_senders: int = 2, num_attempts: int = 4) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.senders = [Sender(WorkerRef(f"p{index}", "0")) for index in range(num_senders)]
        self.receiver = ReceiverCore(PLANNER, WINDOW_BYTES, LINK_TIMEOUT_S)
        self.lines: list[Line] = []
        self.writes: deque[WriteChunk] = deque()
        self.ended: Counter[TransferId] = Counter()
        self.outcomes: dict[TransferId, str] = {}
        self.received: dict[AttemptId, TransferId] = {}
        self.closed: Counter[AttemptId] = Counter()  # received or released
        self.failed: Counter[TransferId] = Counter()
        self.attempts = [AttemptId(RequestId(f"r{index}"), 0) for index in range(num_attempts)]
        self.expected: set[AttemptId] = set()
        self.withdrawn: set[AttemptId] = set()
        self.next_try: Counter[AttemptId] = Counter()
        self.fault_rate = self.rng.choice([0.0, 0.02, 0.1, 0.3])
        self.log: list[object] = []

    # ---- random steps ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one possible thing; False when nothing is possible."""
        faults = self._faults() if self.rng.random() < self.fault_rate else []
        actions = faults or self._wishes() + self._progress()
        if not actions:
            return False
        self.rng.choice(actions)()
        return True

    def settle(self) -> None:
        """No more faults and no new wishes: everything must end in bounded time."""
        for attempt_id in self.expected - set(self.closed) - self.withdrawn:
            self._withdraw(attempt_id)
        for _ in range(100_000):
            if actions := [*self._computations(), *self._progress()]:
                self.rng.choice(actions)()
            elif not self._advance_to_deadline():
                return
        raise AssertionError("does not come to rest")

    def _wishes(self) -> list[Action]:
        actions = self._computations()
        for attempt_id in self.attempts:
            if attempt_id not in self.expected:
                actions.append(lambda attempt_id=attempt_id: self._expect(attempt_id))
            elif self.next_try[attempt_id] < 3 and self.rng.random() < 0.2:
                actions.append(lambda attempt_id=attempt_id: self._start(attempt_id))
        return actions

    def _computations(self) -> list[Action]:
        return [
            lambda sender=sender, transfer_id=transfer_id: self._compute(sender, transfer_id)
            for sender in self.senders
            for transfer_id in sender.computing
        ]

    def _faults(self) -> list[Action]:
        actions: list[Action] = [lambda line=line: self._cut(line) for line in self.lines if not line.is_cut]
        for sender in self.senders:
            for transfer_id in sender.live:
                event = TransferCancelRequested(transfer_id, "cancelled")
                actions.append(lambda sender=sender, event=event: self._to_sender(sender, event))
        for attempt_id in self.expected - set(self.closed) - self.withdrawn:
            actions.append(lambda attempt_id=attempt_id: self._withdraw(attempt_id))
        actions.append(self._pass_time)
        return actions

    def _progress(self) -> list[Action]:
        actions: list[Action] = [action for line in self.lines for action in self._line_progress(line)]
        if self.writes:
            actions.append(self._finish_write)
        return actions

    def _line_progress(self, line: Line) -> list[Action]:
        if line.is_cut:
            return [
                *([] if line.sender_knows else [lambda: self._tell_sender(line)]),
                *([] if line.receiver_knows else [lambda: self._tell_receiver(line)]),
            ]
        if not line.is_up:
            return [lambda: self._come_up(line)]
        actions: list[Action] = []
        if line.to_receiver:
            actions.append(lambda: self._to_receiver(line.to_receiver.popleft()))
        if line.to_sender:
            actions.append(lambda: self._to_sender(line.sender, line.to_sender.popleft()))
        if line.packs:
            actions.append(lambda: self._pack(line))
        if line.payloads and line.receives:
            actions.append(lambda: self._carry(line))
        return actions

    # ---- what happens -----------------------------------------------------------------------------------

    def _expect(self, attempt_id: AttemptId) -> None:
        self.expected.add(attempt_id)
        self._to_receiver(TransferExpected(attempt_id, 0, NUM_TOKENS, ((0,),), len(FIRST)))

    def _withdraw(self, attempt_id: AttemptId) -> None:
        self.withdrawn.add(attempt_id)
        self._to_receiver(ExpectationWithdrawn(attempt_id, "withdrawn"))

    def _start(self, attempt_id: AttemptId) -> None:
        transfer_id = TransferId(attempt_id, self.next_try[attempt_id])
        self.next_try[attempt_id] += 1
        sender = self.rng.choice(self.senders)
        sender.computing[transfer_id] = (0, 0)
        sender.live.add(transfer_id)
        deadline_s = self.now_s + DEADLINE_S
        self._to_sender(sender, TransferStarted(transfer_id, RECEIVER, "addr", 0, NUM_TOKENS, ((0,),), deadline_s))

    def _compute(self, sender: Sender, transfer_id: TransferId) -> None:
        """One more layer of the running range, or the first of the next, or the end."""
        layers, token_end = sender.computing[transfer_id]
        if token_end == NUM_TOKENS and layers == NUM_LAYERS:
            del sender.computing[transfer_id]
            self._to_sender(sender, FirstTokensSampled(transfer_id, FIRST))
            return
        if layers in (0, NUM_LAYERS):
            layers, token_end = 0, min(NUM_TOKENS, token_end + self.rng.randint(1, NUM_TOKENS))
        layers = self.rng.randint(layers + 1, NUM_LAYERS)
        sender.computing[transfer_id] = (layers, token_end)
        self._to_sender(sender, TokensComputed(transfer_id, layers, token_end))

    def _come_up(self, line: Line) -> None:
        line.is_up = True
        self._to_receiver(PeerReady(line.sender.ref))
        self._to_sender(line.sender, PeerReady(RECEIVER))

    def _cut(self, line: Line) -> None:
        line.is_cut = True
        line.receiver_knows = not line.is_up

    def _tell_sender(self, line: Line) -> None:
        line.sender_knows = True
        line.sender.line = None
        self._forget_if_known(line)
        self._to_sender(line.sender, PeerLost(RECEIVER, "cut"))

    def _tell_receiver(self, line: Line) -> None:
        line.receiver_knows = True
        self._forget_if_known(line)
        self._to_receiver(PeerLost(line.sender.ref, "cut"))

    def _forget_if_known(self, line: Line) -> None:
        if line.sender_knows and line.receiver_knows:
            self.lines.remove(line)

    def _pack(self, line: Line) -> None:
        effect = line.packs.popleft()
        assert effect.transfer_id in line.sender.live, "a pack reads the blocks of a transfer that has ended"
        line.payloads.append(effect)
        self._to_sender(line.sender, ChunkPacked(effect.transfer_id, effect.chunk.seq))

    def _carry(self, line: Line) -> None:
        """A payload meets the posted receive: they must have been announced as the same."""
        sent, posted = line.payloads.popleft(), line.receives.popleft()
        assert (sent.transfer_id, sent.chunk) == (posted.transfer_id, posted.chunk)
        error = "flipped" if self.rng.random() < self.fault_rate / 10 else None
        self._to_sender(line.sender, ChunkSent(sent.transfer_id, sent.chunk.seq))
        self._to_receiver(ChunkReceived(line.sender.ref, sent.transfer_id, sent.chunk.seq, error))

    def _finish_write(self) -> None:
        effect = self.writes.popleft()
        assert self.closed[effect.transfer_id.attempt_id] == 0, "a write touches blocks that were given up"
        self._to_receiver(ChunkWritten(effect.transfer_id, effect.chunk.seq))

    def _pass_time(self) -> None:
        self.now_s += self.rng.choice([0.1, 1.0, LINK_TIMEOUT_S])
        self._fire_deadlines()

    def _advance_to_deadline(self) -> bool:
        cores = [self.receiver, *(sender.core for sender in self.senders)]
        deadlines = [deadline for core in cores if (deadline := core.next_deadline_s()) is not None]
        if not deadlines:
            return False
        self.now_s = max(self.now_s, min(deadlines))
        self._fire_deadlines()
        return True

    def _fire_deadlines(self) -> None:
        for sender in self.senders:
            self._perform_for_sender(sender, list(sender.core.handle_deadline(self.now_s)))
        self._perform_for_receiver(list(self.receiver.handle_deadline(self.now_s)))

    # ---- the shells -----------------------------------------------------------------------------------

    def _to_sender(self, sender: Sender, event: SenderEvent) -> None:
        self.log.append((sender.ref, event))
        effects = sender.core.handle(event, self.now_s)
        sender.core.check_invariants()
        self._perform_for_sender(sender, list(effects))

    def _perform_for_sender(self, sender: Sender, effects: list[SenderEffect]) -> None:
        for effect in effects:
            self.log.append((sender.ref, effect))
            match effect:
                case ConnectPeer():
                    assert sender.line is None
                    sender.line = self._new_line(sender)
                case TransferEnded():
                    sender.live.remove(effect.transfer_id)
                    sender.computing.pop(effect.transfer_id, None)
                    self.ended[effect.transfer_id] += 1
                    self.outcomes[effect.transfer_id] = effect.outcome
                case _:
                    assert sender.line is not None
                    self._send(sender.line, effect)

    def _new_line(self, sender: Sender) -> Line:
        """The receiver's shell ends an older session of the same peer before it accepts a new one."""
        for line in [line for line in self.lines if line.sender is sender]:
            assert line.is_cut
            self._tell_receiver(line)
        line = Line(sender)
        self.lines.append(line)
        return line

    def _send(self, line: Line, effect: SendChunk | SendFinished | SendCancel | DropPeer) -> None:
        if line.is_cut:
            return
        peer = line.sender.ref
        match effect:
            case SendChunk():
                line.to_receiver.append(ChunkAnnounced(peer, effect.transfer_id, effect.chunk))
                line.packs.append(effect)
            case SendFinished():
                finish = FinishAnnounced(peer, effect.transfer_id, effect.num_chunks, effect.tokens)
                line.to_receiver.append(finish)
            case SendCancel():
                line.to_receiver.append(CancelAnnounced(peer, effect.transfer_id, effect.reason))
            case DropPeer():
                self._cut(line)

    def _to_receiver(self, event: ReceiverEvent) -> None:
        self.log.append((RECEIVER, event))
        effects = self.receiver.handle(event, self.now_s)
        self.receiver.check_invariants()
        self._perform_for_receiver(list(effects))

    def _perform_for_receiver(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            self.log.append((RECEIVER, effect))
            match effect:
                case TransferReceived():
                    self.received[effect.transfer_id.attempt_id] = effect.transfer_id
                    self.closed[effect.transfer_id.attempt_id] += 1
                case AttemptReleased():
                    self.closed[effect.attempt_id] += 1
                case TransferFailedLocally():
                    self.failed[effect.transfer_id] += 1
                case WriteChunk():
                    self.writes.append(effect)
                case DiscardChunk():
                    pass
                case _:
                    self._answer(effect)

    def _answer(self, effect: PostReceive | SendAcknowledged | SendCancel | DropPeer) -> None:
        line = next((each for each in self.lines if each.sender.ref == effect.peer and each.is_up), None)
        if line is None or line.is_cut:
            return
        match effect:
            case PostReceive():
                line.receives.append(effect)
            case SendAcknowledged():
                line.to_sender.append(AcknowledgedByPeer(effect.transfer_id))
            case SendCancel():
                line.to_sender.append(CancelledByPeer(effect.transfer_id, effect.reason))
            case DropPeer():
                self._cut(line)
