"""Every interleaving of a handoff: the production sender and receiver cores between stand-ins for all around them.

Real: `SenderCore`, `ReceiverCore`, chunk planning and coverage. Stand-ins: the compute that reports layers, the pack
thread, the two ordered control streams, the link (a send completes only when its receive was posted), the writes.
KV is a name: the cell (layer, token) of a try holds "try", so a block filled by the wrong transfer names it.

Faults are budgeted by name (`handoff_faults` makes them happen): the session breaks (each side hears it in its own
time, what was under way is lost), a chunk arrives corrupt, the receiver freezes, either process dies and starts a new
life, either worker wants to cancel (again), time passes a deadline, a peer breaks the protocol.
"""

from collections.abc import Callable, Sequence

from common.engine.executor.one_behind import OneBehind
from common.values.ids import AttemptId, RequestId, TransferId
from common.values.request import SampledToken
from kvtransfer.events import (
    AttemptReleased,
    FirstToken,
    FirstTokensSampled,
    ReceiverEffect,
    ReceiverEvent,
    SendChunk,
    SenderEffect,
    SenderEvent,
    TokensComputed,
    TransferEnded,
    TransferExpected,
    TransferFailedLocally,
    TransferOutcome,
    TransferReceived,
    TransferStarted,
    WriteChunk,
)
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.sender.core import SenderCore
from tests.simkit import handoff_checks
from tests.simkit.handoff_faults import HandoffFaults
from tests.simkit.handoff_net import HandoffNet
from tests.simkit.handoff_parts import (
    NUM_LAYERS,
    Grant,
    Pair,
    Ranks,
    Try,
    new_receiver,
    new_sender,
    ref_of,
)
from tests.simkit.layered_engine import Payload

TOKENS = (FirstToken(0, SampledToken(7)),)
DEADLINE_S = 100.0


class HandoffWorld:
    """One or two requests, one or two prefill workers, one decode worker; each in one life after the other.

    A prompt of `num_tokens` is computed in as many prefill chunks, each layer by layer; each cell is a chunk to send.
    Of prefill workers of several ranks each rank writes its part of a cell in its own time.
    """

    def __init__(
        self,
        faults: dict[str, int] | None = None,
        *,
        num_requests: int = 1,
        num_senders: int = 1,
        num_tries: int = 1,
        num_tokens: int = 2,
        num_ranks: int = 1,
        is_granted_late: bool = False,
    ) -> None:
        self.faults = HandoffFaults(dict(faults or {}))
        self.num_tries = num_tries
        self.num_tokens = num_tokens
        self.num_ranks = num_ranks
        # What the compute reports, in order.
        self.progress = [(layer + 1, token + 1) for token in range(num_tokens) for layer in range(NUM_LAYERS)]
        self.senders: dict[str, SenderCore] = {f"p{idx}.1": new_sender() for idx in range(num_senders)}
        self.receivers: dict[str, ReceiverCore] = {"d.1": new_receiver()}
        self.net: HandoffNet = HandoffNet([*self.senders, *self.receivers])
        self.tries: list[Try] = []
        self.grants: dict[AttemptId, Grant] = {}
        self.now_s = 0.0
        for idx in range(num_requests):
            self.start_attempt(AttemptId(RequestId(f"r{idx}"), 0), idx, is_expected=not is_granted_late)

    def start_attempt(self, attempt_id: AttemptId, sender_idx: int, *, is_expected: bool = True) -> None:
        """Grant an attempt on the living decode worker and start its first try."""
        (receiver,) = self.receivers
        self.grants[attempt_id] = Grant(receiver, is_expected)
        if is_expected:
            self._expect(attempt_id)
        self._start(TransferId(attempt_id, 0), sender_idx)

    # ---- what may happen ----------------------------------------------------------------------------

    def choices(self) -> Sequence[str]:
        choices = [f"compute {idx}" for idx, entry in enumerate(self.tries) if self._can_compute(entry)]
        choices += [choice for idx, entry in enumerate(self.tries) for choice in self._rank_choices(idx, entry)]
        choices += self.net.choices()
        choices += [f"retry {idx}" for idx, key in enumerate(self.grants) if self._can_retry(key)]
        choices += [f"replay {idx}" for idx, key in enumerate(self.grants) if self._can_replay(key)]
        choices += [f"expect {idx}" for idx, grant in enumerate(self.grants.values()) if not grant.is_expected]
        # When nothing else can happen, time passes: that is no fault, it is what deadlines are for.
        if not choices and self.next_deadline_s() is not None:
            choices.append("deadline 0")
        return choices + self.faults.choices(self)

    def _can_compute(self, entry: Try) -> bool:
        is_step_over = entry.ranks is None or entry.num_computed == len(self.progress)
        return entry.outcome is None and is_step_over and entry.num_computed <= len(self.progress)

    def _rank_choices(self, idx: int, entry: Try) -> list[str]:
        ranks = entry.ranks
        if ranks is None or entry.outcome is not None or entry.num_computed >= len(self.progress):
            return []
        writes = [f"rank_writes {idx * self.num_ranks + rank}" for rank in ranks.who_can_write()]
        return writes + ([f"step_ends {idx}"] if ranks.can_end_step else [])

    def _can_retry(self, attempt_id: AttemptId) -> bool:
        tries = [entry for entry in self.tries if entry.transfer_id.attempt_id == attempt_id]
        is_over = tries[-1].outcome not in (None, TransferOutcome.DONE)
        return is_over and len(tries) < self.num_tries and self.grants[attempt_id].end is None

    def _can_replay(self, attempt_id: AttemptId) -> bool:
        is_crashed = self.grants[attempt_id].end == "crashed"
        return is_crashed and attempt_id._replace(attempt=attempt_id.attempt + 1) not in self.grants

    # ---- letting it happen --------------------------------------------------------------------------

    def apply(self, choice: str) -> None:
        if choice.startswith("!"):
            self.faults.apply(self, choice[1:])
            return
        action, _, idx = choice.partition(" ")
        if action == "deadline":
            self.pass_deadline()
        elif action in ("compute", "rank_writes", "step_ends", "retry", "replay", "expect"):
            getattr(self, f"_do_{action}")(int(idx))
        else:
            self.net.apply(self, choice)

    def _do_compute(self, idx: int) -> None:
        entry = self.tries[idx]
        if entry.num_computed < len(self.progress):
            event: SenderEvent = TokensComputed(entry.transfer_id, *self.progress[entry.num_computed])
        else:
            event = FirstTokensSampled(entry.transfer_id, TOKENS)
        entry.num_computed += 1
        self.to_sender(entry.pair.sender, event)

    def _do_rank_writes(self, number: int) -> None:
        entry, rank = self.tries[number // self.num_ranks], number % self.num_ranks
        assert entry.ranks is not None
        entry.ranks.written[rank] += 1
        if rank == 0:
            num_layers = entry.ranks.written[0] - entry.ranks.num_steps * NUM_LAYERS
            self._report(entry, entry.ranks, lambda hook: hook(num_layers))

    def _do_step_ends(self, idx: int) -> None:
        entry = self.tries[idx]
        assert entry.ranks is not None
        self._report(entry, entry.ranks, OneBehind.end)
        entry.num_computed += NUM_LAYERS
        entry.ranks.num_steps, entry.ranks.num_layers = entry.ranks.num_steps + 1, 0

    def _report(self, entry: Try, ranks: Ranks, call: Callable[[OneBehind], None]) -> None:
        """As rank 0's runner does."""
        token_end = ranks.num_steps + 1
        hook = OneBehind(
            lambda num: self.to_sender(entry.pair.sender, TokensComputed(entry.transfer_id, num, token_end))
        )
        hook._num_layers = ranks.num_layers
        call(hook)
        ranks.num_layers = hook._num_layers

    def _do_retry(self, idx: int) -> None:
        attempt_id = list(self.grants)[idx]
        number = sum(entry.transfer_id.attempt_id == attempt_id for entry in self.tries)
        self._start(TransferId(attempt_id, number), number)

    def _do_replay(self, idx: int) -> None:
        attempt_id = list(self.grants)[idx]
        self.start_attempt(attempt_id._replace(attempt=attempt_id.attempt + 1), idx)

    def _do_expect(self, idx: int) -> None:
        attempt_id = list(self.grants)[idx]
        self.grants[attempt_id].is_expected = True
        self._expect(attempt_id)

    def pass_deadline(self) -> None:
        deadline_s = self.next_deadline_s()
        assert deadline_s is not None
        self.now_s = max(self.now_s, deadline_s)
        for name, sender in list(self.senders.items()):
            self._perform_sender(name, sender.handle_deadline(self.now_s))
        for name, receiver in list(self.receivers.items()):
            if name != self.net.frozen:
                self._perform_receiver(name, receiver.handle_deadline(self.now_s))

    # ---- performing effects -------------------------------------------------------------------------

    def _start(self, transfer_id: TransferId, sender_idx: int) -> None:
        names = list(self.senders)
        name = names[sender_idx % len(names)]
        receiver = self.grants[transfer_id.attempt_id].receiver
        ranks = Ranks([0] * self.num_ranks) if self.num_ranks > 1 else None
        self.tries.append(Try(transfer_id, Pair(name, receiver), ranks=ranks))
        deadline_s = self.now_s + DEADLINE_S
        self.to_sender(
            name, TransferStarted(transfer_id, ref_of(receiver), "", 0, self.num_tokens, ((0,),), deadline_s)
        )

    def _expect(self, attempt_id: AttemptId) -> None:
        table = (list(self.grants).index(attempt_id),)
        receiver = self.grants[attempt_id].receiver
        self.to_receiver(receiver, TransferExpected(attempt_id, 0, self.num_tokens, (table,), len(TOKENS)))

    def to_sender(self, name: str, event: SenderEvent) -> None:
        self._perform_sender(name, self.senders[name].handle(event, self.now_s))

    def to_receiver(self, name: str, event: ReceiverEvent) -> None:
        self._perform_receiver(name, self.receivers[name].handle(event, self.now_s))

    def _perform_sender(self, name: str, effects: Sequence[SenderEffect]) -> None:
        for effect in effects:
            self._perform_sender_effect(name, effect)

    def _perform_sender_effect(self, name: str, effect: SenderEffect) -> None:
        if isinstance(effect, TransferEnded):
            self._end_transfer(effect)
            return
        if isinstance(effect, SendChunk):
            assert self._try(effect.transfer_id).outcome is None, f"{effect.transfer_id} is read after it ended"
        self.net.perform_sender(name, effect)

    def _end_transfer(self, effect: TransferEnded) -> None:
        entry = self._try(effect.transfer_id)
        assert entry.outcome is None, f"{entry.transfer_id} ended twice"
        session = self.net.sessions.get(entry.pair)
        packing = [chunk for chunk in session.packing if chunk.transfer_id == entry.transfer_id] if session else []
        assert not packing, f"{entry.transfer_id} ended while a pack reads its blocks"
        entry.outcome = effect.outcome

    def _perform_receiver(self, name: str, effects: Sequence[ReceiverEffect]) -> None:
        for effect in effects:
            self._perform_receiver_effect(name, effect)

    def _perform_receiver_effect(self, name: str, effect: ReceiverEffect) -> None:
        match effect:
            case TransferReceived(transfer_id):
                self._end_attempt(transfer_id.attempt_id, "received")
                self._check_cells(transfer_id)
            case AttemptReleased(attempt_id):
                self._end_attempt(attempt_id, "released")
            case TransferFailedLocally():
                pass
            case _:
                self.net.perform_receiver(name, effect)

    def read_chunk(self, name: str, effect: SendChunk) -> Payload:
        """Every cell holds the try that computed it."""
        assert name in self.senders
        chunk, prefill_try, ranks = effect.chunk, effect.transfer_id.prefill_try, self._try(effect.transfer_id).ranks
        if ranks is not None:
            last = chunk.layer_end - 1, chunk.token_end - 1
            assert ranks.has_all(*last), f"layer {last[0]} of token {last[1]} is read before every rank has written it"
        return [[prefill_try] * (chunk.token_end - chunk.token_start)] * (chunk.layer_end - chunk.layer_start)

    def write_chunk(self, name: str, effect: WriteChunk, payload: Payload) -> None:
        grant, chunk = self.grants[effect.transfer_id.attempt_id], effect.chunk
        assert grant.receiver == name
        assert grant.end is None, f"a write into blocks of {effect.transfer_id} after it was {grant.end}"
        for layer, row in enumerate(payload, chunk.layer_start):
            for token, prefill_try in enumerate(row, chunk.token_start):
                grant.cells[(layer, token)] = prefill_try

    def _end_attempt(self, attempt_id: AttemptId, how: str) -> None:
        grant = self.grants[attempt_id]
        assert grant.end is None, f"{attempt_id} {how} after it was {grant.end}"
        writing = [effect for _, effect in self.net.writing if effect.transfer_id.attempt_id == attempt_id]
        assert not writing, f"{attempt_id} {how} while a write touches its blocks"
        grant.end = how

    def _check_cells(self, transfer_id: TransferId) -> None:
        expected = {(layer, token) for layer in range(NUM_LAYERS) for token in range(self.num_tokens)}
        cells = self.grants[transfer_id.attempt_id].cells
        assert cells.keys() == expected, f"{transfer_id} received without {expected - cells.keys()}"
        assert set(cells.values()) == {transfer_id.prefill_try}, f"{transfer_id} received with KV of {cells}"

    def _try(self, transfer_id: TransferId) -> Try:
        return next(entry for entry in self.tries if entry.transfer_id == transfer_id)

    # ---- properties ---------------------------------------------------------------------------------

    def check(self) -> None:
        handoff_checks.check(self)

    def check_quiet(self) -> None:
        handoff_checks.check_quiet(self)

    def key_parts(self) -> object:
        return self, handoff_checks.identity_facts(self)

    def next_deadline_s(self) -> float | None:
        awake = [core for name, core in self.receivers.items() if name != self.net.frozen]
        deadlines = [*(core.next_deadline_s() for core in self.senders.values()), *(c.next_deadline_s() for c in awake)]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)
