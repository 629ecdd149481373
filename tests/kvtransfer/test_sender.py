"""The sender core: every row of its tables, and what it promises about blocks, windows and ends."""

from itertools import permutations

import pytest

from common.values.errors import InvalidTransition
from common.values.ids import TransferId, WorkerRef
from common.values.request import SampledToken
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelledByPeer,
    Chunk,
    ChunkPacked,
    ChunkSent,
    ConnectPeer,
    DropPeer,
    FirstToken,
    FirstTokensSampled,
    PeerLost,
    PeerReady,
    SendCancel,
    SendChunk,
    SenderEffect,
    SenderEvent,
    SendFinished,
    TokensComputed,
    TransferCancelRequested,
    TransferEnded,
    TransferOutcome,
    TransferStarted,
)
from kvtransfer.sender.core import PEER_ROWS, TRANSFER_ROWS, SenderCore
from kvtransfer.sender.state import SenderPeerState, TransferState
from tests.caches import row_spec
from tests.kvtransfer.cluster import new_transfer_id

D, OTHER = WorkerRef("d", "1"), WorkerRef("e", "1")
T, U = new_transfer_id("t"), new_transfer_id("u")
FIRST = (FirstToken(0, SampledToken(5)),)
PLANNER = ChunkPlanner(row_spec(2, 100), min_chunk_bytes=1000)
CHUNK_BYTES = PLANNER.num_bytes(0, 1, 10)  # one layer of a 10-token prefill chunk
TABLE = (0, 1)


def start(transfer_id: TransferId = T, peer: WorkerRef = D, deadline_s: float = 100.0) -> TransferStarted:
    return TransferStarted(transfer_id, peer, "addr", 0, 10, (TABLE,), deadline_s)


def chunk(seq: int) -> Chunk:
    return Chunk(seq, seq, seq + 1, 0, 10, CHUNK_BYTES)


def send(seq: int, transfer_id: TransferId = T, peer: WorkerRef = D) -> SendChunk:
    return SendChunk(peer, transfer_id, chunk(seq), TABLE)


class Driver:
    """A core and everything that came out of it; invariants are checked after each event."""

    def __init__(self, num_chunks_in_window: int = 10) -> None:
        self.core = SenderCore(PLANNER, num_chunks_in_window * CHUNK_BYTES, link_timeout_s=5.0)
        self.now_s = 0.0

    def do(self, *events: SenderEvent) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        for event in events:
            effects += self.core.handle(event, self.now_s)
            self.core.check_invariants()
        return effects

    def at(self, now_s: float) -> list[SenderEffect]:
        self.now_s = now_s
        effects = list(self.core.handle_deadline(now_s))
        self.core.check_invariants()
        return effects


def computed(transfer_id: TransferId = T) -> list[SenderEvent]:
    return [TokensComputed(transfer_id, 2, 10), FirstTokensSampled(transfer_id, FIRST)]


def in_transfer_state(state: TransferState) -> Driver:
    driver = Driver(num_chunks_in_window=1 if state is TransferState.FLUSHING else 10)
    if state is not TransferState.ABSENT:
        driver.do(start(), PeerReady(D), TokensComputed(T, 1, 10))
    if state in (TransferState.FLUSHING, TransferState.AWAITING):
        driver.do(*computed())
    if state is TransferState.ENDING:
        driver.do(TransferCancelRequested(T, "x"))
    return driver


def in_peer_state(state: SenderPeerState) -> Driver:
    driver = Driver()
    if state is not SenderPeerState.ABSENT:
        driver.do(start())
    if state in (SenderPeerState.READY, SenderPeerState.DROPPING):
        driver.do(PeerReady(D), TokensComputed(T, 1, 10), ChunkPacked(T, 0))
    if state is SenderPeerState.DROPPING:
        assert driver.at(5.0) == [DropPeer(D, "no progress for 5.0 s")]
    return driver


TRANSFER_EVENTS: list[SenderEvent] = [
    start(),
    TokensComputed(T, 2, 10),
    FirstTokensSampled(T, FIRST),
    ChunkPacked(T, 0),
    TransferCancelRequested(T, "x"),
    AcknowledgedByPeer(T),
    CancelledByPeer(T, "y"),
]


@pytest.mark.parametrize("state", TransferState)
@pytest.mark.parametrize("event", TRANSFER_EVENTS, ids=lambda event: type(event).__name__)
def test_each_transfer_row_is_legal_and_everything_else_raises(event: SenderEvent, state: TransferState) -> None:
    driver = in_transfer_state(state)
    if (type(event), state) in TRANSFER_ROWS:
        driver.do(event)
    else:
        with pytest.raises(InvalidTransition, match=f"{type(event).__name__} while {state}"):
            driver.do(event)


@pytest.mark.parametrize("state", SenderPeerState)
@pytest.mark.parametrize("event", [PeerReady(D), PeerLost(D, "gone")], ids=lambda event: type(event).__name__)
def test_each_peer_row_is_legal_and_everything_else_raises(event: SenderEvent, state: SenderPeerState) -> None:
    driver = in_peer_state(state)
    if (type(event), state) in PEER_ROWS:
        driver.do(event)
    else:
        with pytest.raises(InvalidTransition, match=f"{type(event).__name__} while {state}"):
            driver.do(event)


def test_the_tables_name_every_state_and_event() -> None:
    assert {event for event, _ in TRANSFER_ROWS} == {type(event) for event in TRANSFER_EVENTS}
    assert {state for _, state in TRANSFER_ROWS} == set(TransferState)
    assert {state for _, state in PEER_ROWS} == set(SenderPeerState)


def test_an_illegal_event_tells_the_transfers_story() -> None:
    driver = in_transfer_state(TransferState.STREAMING)
    with pytest.raises(InvalidTransition) as caught:
        driver.do(start())
    assert "TransferStarted(" in str(caught.value)
    assert "TokensComputed(" in str(caught.value)


def test_chunks_wait_for_the_peer_then_go_in_order_and_the_acknowledgement_ends_it() -> None:
    driver = Driver()
    assert driver.do(start()) == [ConnectPeer(D, "addr")]
    assert driver.do(*computed()) == []
    assert driver.do(PeerReady(D)) == [SendFinished(D, T, 2, FIRST), send(0), send(1)]
    packed_and_sent = [ChunkPacked(T, 0), ChunkSent(T, 0), ChunkPacked(T, 1), ChunkSent(T, 1)]
    assert driver.do(*packed_and_sent) == []
    assert driver.do(AcknowledgedByPeer(T)) == [TransferEnded(T, TransferOutcome.DONE)]
    assert driver.core.num_transfers == 0


def test_layers_leave_while_later_ones_compute_and_the_finish_goes_out_at_once() -> None:
    driver = Driver(num_chunks_in_window=1)
    driver.do(start(), PeerReady(D))
    assert driver.do(TokensComputed(T, 1, 10)) == [send(0)]
    assert driver.do(*computed()) == [SendFinished(D, T, 2, FIRST)]
    assert driver.do(ChunkPacked(T, 0), ChunkSent(T, 0)) == [send(1)]


def test_done_comes_only_by_acknowledgement() -> None:
    driver = in_transfer_state(TransferState.AWAITING)
    assert driver.do(ChunkPacked(T, 0), ChunkSent(T, 0), ChunkPacked(T, 1), ChunkSent(T, 1)) == []
    assert driver.core.num_transfers == 1


def test_an_acknowledgement_before_the_pack_is_reported_waits_for_it() -> None:
    driver = in_transfer_state(TransferState.AWAITING)
    driver.do(ChunkPacked(T, 0))
    assert driver.do(AcknowledgedByPeer(T)) == []
    assert driver.do(ChunkPacked(T, 1)) == [TransferEnded(T, TransferOutcome.DONE)]


def test_cancel_acts_between_chunks_and_ends_after_the_last_pack() -> None:
    driver = in_transfer_state(TransferState.FLUSHING)
    assert driver.do(TransferCancelRequested(T, "client left")) == [SendCancel(D, T, "client left")]
    assert driver.do(ChunkPacked(T, 0)) == [TransferEnded(T, TransferOutcome.CANCELLED, "client left")]
    assert driver.do(ChunkSent(T, 0)) == []


def test_a_transfer_that_the_peer_never_heard_of_is_cancelled_silently() -> None:
    driver = Driver()
    driver.do(start())
    expected = [TransferEnded(T, TransferOutcome.CANCELLED, "client left")]
    assert driver.do(TransferCancelRequested(T, "client left")) == expected


def test_a_cancel_by_the_peer_stops_the_queue_and_is_not_answered() -> None:
    driver = in_transfer_state(TransferState.FLUSHING)
    driver.do(ChunkPacked(T, 0))
    assert driver.do(CancelledByPeer(T, "withdrawn")) == [TransferEnded(T, TransferOutcome.CANCELLED, "withdrawn")]
    assert driver.do(ChunkSent(T, 0)) == []


def test_the_deadline_cancels() -> None:
    driver = Driver()
    driver.do(start(deadline_s=3.0), PeerReady(D), TokensComputed(T, 1, 10), ChunkPacked(T, 0), ChunkSent(T, 0))
    assert driver.core.next_deadline_s() == 3.0
    assert driver.at(2.9) == []
    ended = TransferEnded(T, TransferOutcome.CANCELLED, "deadline exceeded")
    assert driver.at(3.0) == [SendCancel(D, T, "deadline exceeded"), ended]
    assert driver.core.next_deadline_s() is None


def test_a_lost_link_ends_all_its_transfers_and_no_other() -> None:
    driver = Driver()
    driver.do(start(T, D), start(U, OTHER), PeerReady(D), PeerReady(OTHER), TokensComputed(T, 1, 10))
    assert driver.do(PeerLost(D, "killed")) == [TransferEnded(T, TransferOutcome.LINK_LOST, "killed")]
    assert driver.do(*computed(U)) == [send(0, U, OTHER), send(1, U, OTHER), SendFinished(OTHER, U, 2, FIRST)]
    assert driver.do(PeerLost(D, "again")) == []


def test_a_decided_outcome_survives_the_loss_of_the_link() -> None:
    driver = in_transfer_state(TransferState.ENDING)
    assert driver.do(PeerLost(D, "killed")) == [TransferEnded(T, TransferOutcome.CANCELLED, "x")]


def test_a_lost_peer_is_connected_again_by_the_next_transfer() -> None:
    driver = Driver()
    driver.do(start(T), PeerReady(D), PeerLost(D, "killed"))
    assert driver.do(start(U)) == [ConnectPeer(D, "addr")]


def test_the_window_bounds_what_is_announced_and_not_taken() -> None:
    driver = Driver(num_chunks_in_window=1)
    driver.do(start(T), start(U), PeerReady(D))
    assert driver.do(TokensComputed(T, 2, 10), TokensComputed(U, 2, 10)) == [send(0)]
    assert driver.do(ChunkPacked(T, 0)) == []
    assert driver.do(ChunkSent(T, 0)) == [send(1)]


def test_a_chunk_larger_than_the_window_goes_alone() -> None:
    core = SenderCore(PLANNER, max_inflight_bytes=10, link_timeout_s=5.0)
    core.handle(start(), 0.0)
    core.handle(PeerReady(D), 0.0)
    assert core.handle(TokensComputed(T, 2, 10), 0.0) == [send(0)]
    core.check_invariants()


def test_transfers_to_one_peer_take_turns() -> None:
    driver = Driver(num_chunks_in_window=1)
    driver.do(start(T), start(U), TokensComputed(T, 2, 10), TokensComputed(U, 2, 10))
    order: list[tuple[TransferId, int]] = []
    effects = driver.do(PeerReady(D))
    while effects:
        (effect,) = effects
        assert isinstance(effect, SendChunk)
        order.append((effect.transfer_id, effect.chunk.seq))
        effects = driver.do(ChunkPacked(*order[-1]), ChunkSent(*order[-1]))
    assert order == [(T, 0), (U, 0), (T, 1), (U, 1)]


def test_a_peer_that_takes_nothing_is_dropped_and_its_silence_counted_from_the_last_chunk() -> None:
    driver = Driver(num_chunks_in_window=1)
    driver.do(start(), PeerReady(D))
    driver.now_s = 4.0
    driver.do(TokensComputed(T, 2, 10), ChunkPacked(T, 0))
    driver.now_s = 6.0
    assert driver.do(ChunkSent(T, 0)) == [send(1)]
    assert driver.core.next_deadline_s() == 11.0
    assert driver.at(11.0) == [DropPeer(D, "no progress for 5.0 s")]
    assert driver.at(12.0) == []
    assert driver.do(PeerLost(D, "dropped")) == [TransferEnded(T, TransferOutcome.LINK_LOST, "dropped")]


def test_an_idle_peer_is_not_dropped() -> None:
    driver = Driver()
    driver.do(start(deadline_s=1e9), PeerReady(D), TokensComputed(T, 1, 10), ChunkPacked(T, 0), ChunkSent(T, 0))
    assert driver.at(1e6) == []


def test_a_peer_that_does_not_come_up_is_dropped() -> None:
    driver = Driver()
    driver.do(start())
    assert driver.at(5.0) == [DropPeer(D, "no progress for 5.0 s")]


def test_nothing_is_sent_to_a_peer_that_is_being_dropped() -> None:
    driver = in_peer_state(SenderPeerState.DROPPING)
    assert driver.do(start(U), *computed(T), *computed(U)) == []
    ended = [TransferEnded(t, TransferOutcome.LINK_LOST, "gone") for t in (T, U)]
    assert driver.do(PeerLost(D, "gone")) == ended


def test_an_acknowledgement_before_everything_is_announced_drops_the_peer() -> None:
    driver = in_transfer_state(TransferState.STREAMING)
    assert driver.do(AcknowledgedByPeer(T)) == [DropPeer(D, "acknowledged t/0/0 early")]


@pytest.mark.parametrize("event", [ChunkSent(T, 0), ChunkPacked(T, 1), ChunkSent(U, 0)], ids=str)
def test_a_report_of_a_chunk_that_is_not_under_way_raises(event: SenderEvent) -> None:
    with pytest.raises(InvalidTransition):
        in_transfer_state(TransferState.STREAMING).do(event)


def test_a_pack_is_reported_once() -> None:
    driver = in_transfer_state(TransferState.STREAMING)
    driver.do(ChunkPacked(T, 0))
    with pytest.raises(InvalidTransition, match="not being packed"):
        driver.do(ChunkPacked(T, 0))


def test_computing_backwards_raises() -> None:
    driver = in_transfer_state(TransferState.STREAMING)
    with pytest.raises(InvalidTransition, match="backwards"):
        driver.do(TokensComputed(T, 0, 10))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_cancel_acknowledgements_and_deadline_end_a_transfer_once_in_any_order(order: tuple[int, ...]) -> None:
    driver = in_transfer_state(TransferState.AWAITING)
    driver.do(ChunkPacked(T, 0), ChunkPacked(T, 1), ChunkSent(T, 0), ChunkSent(T, 1))
    late = [
        lambda: driver.do(TransferCancelRequested(T, "abort")),
        lambda: driver.do(AcknowledgedByPeer(T)),
        lambda: driver.do(AcknowledgedByPeer(T)),
        lambda: driver.at(100.0),
    ]
    effects = [effect for position in order for effect in late[position]()]
    assert sum(isinstance(effect, TransferEnded) for effect in effects) == 1
    assert driver.core.num_transfers == 0
