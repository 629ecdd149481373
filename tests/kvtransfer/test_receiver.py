"""The receiver core: every row of its tables, and what it promises about blocks, draining and completeness."""

from dataclasses import replace

import pytest

from common.values.errors import InvalidTransition
from common.values.ids import TransferId, WorkerRef
from common.values.request import KvChunkTiming, SampledToken
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AttemptReleased,
    CancelAnnounced,
    Chunk,
    ChunkAnnounced,
    ChunkReceived,
    ChunkWritten,
    DiscardChunk,
    DropPeer,
    ExpectationWithdrawn,
    FinishAnnounced,
    FirstToken,
    PeerLost,
    PeerReady,
    PostReceive,
    ReceiverEffect,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    TransferExpected,
    TransferFailedLocally,
    TransferOutcome,
    TransferReceived,
    WriteChunk,
)
from kvtransfer.receiver.core import ATTEMPT_ROWS, PEER_ROWS, TRANSFER_ROWS, ReceiverCore
from kvtransfer.receiver.coverage import Coverage
from kvtransfer.receiver.state import (
    MAX_TIMED_CHUNKS,
    ExpectationState,
    ReceiverPeerState,
    ReceiverTransfer,
    TransferStatus,
)
from tests.caches import row_spec
from tests.kvtransfer.cluster import new_transfer_id

P, OTHER = WorkerRef("p", "1"), WorkerRef("q", "1")
T, NEWER = new_transfer_id("t", 1), new_transfer_id("t", 2)
ATTEMPT = T.attempt_id
FIRST = (FirstToken(0, SampledToken(5)),)
PLANNER = ChunkPlanner(row_spec(2, 100), min_chunk_bytes=1000)
CHUNK_BYTES = PLANNER.num_bytes(0, 1, 10)
TABLE = (4, 2)
EXPECT = TransferExpected(ATTEMPT, 0, 10, (TABLE,), 1)
UNKNOWN = new_transfer_id("unknown")


def chunk(seq: int) -> Chunk:
    return Chunk(seq, seq, seq + 1, 0, 10, CHUNK_BYTES)


def timing(seq: int, before_end_s: float) -> KvChunkTiming:
    return KvChunkTiming(before_end_s, seq, seq + 1, 10)


def received_at_once() -> TransferReceived:
    return TransferReceived(T, FIRST, 2 * CHUNK_BYTES, 2, 0.0, 0.0, (timing(0, 0.0), timing(1, 0.0)))


def announce(seq: int, transfer_id: TransferId = T, peer: WorkerRef = P) -> ChunkAnnounced:
    return ChunkAnnounced(peer, transfer_id, chunk(seq))


def post(seq: int, transfer_id: TransferId = T, peer: WorkerRef = P) -> PostReceive:
    return PostReceive(peer, transfer_id, chunk(seq))


def received(seq: int, transfer_id: TransferId = T, peer: WorkerRef = P, error: str | None = None) -> ChunkReceived:
    return ChunkReceived(peer, transfer_id, seq, error)


def write(seq: int, transfer_id: TransferId = T, peer: WorkerRef = P) -> WriteChunk:
    return WriteChunk(peer, transfer_id, chunk(seq), TABLE)


def finish(num_chunks: int = 2, transfer_id: TransferId = T, peer: WorkerRef = P) -> FinishAnnounced:
    return FinishAnnounced(peer, transfer_id, num_chunks, FIRST)


def failed(reason: str, transfer_id: TransferId = T) -> list[ReceiverEffect]:
    return [SendCancel(P, transfer_id, reason), TransferFailedLocally(transfer_id, TransferOutcome.CANCELLED, reason)]


class Driver:
    """A core with peer P connected; invariants are checked after each event."""

    def __init__(self, *events: ReceiverEvent, num_chunks_in_window: int = 10) -> None:
        self.core = ReceiverCore(PLANNER, num_chunks_in_window * CHUNK_BYTES, link_timeout_s=5.0)
        self.now_s = 0.0
        self.do(PeerReady(P), *events)

    def do(self, *events: ReceiverEvent) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        for event in events:
            effects += self.core.handle(event, self.now_s)
            self.core.check_invariants()
        return effects

    def at(self, now_s: float) -> list[ReceiverEffect]:
        self.now_s = now_s
        effects = list(self.core.handle_deadline(now_s))
        self.core.check_invariants()
        return effects


def test_a_transfer_is_received_written_and_acknowledged() -> None:
    driver = Driver(EXPECT)
    driver.now_s = 1.0
    assert driver.do(announce(0), announce(1)) == [post(0), post(1)]
    driver.now_s = 2.0
    assert driver.do(received(0), received(1)) == [write(0), write(1)]
    driver.now_s = 2.5
    assert driver.do(finish(), ChunkWritten(T, 0)) == []
    driver.now_s = 4.0
    assert driver.do(ChunkWritten(T, 1)) == [
        SendAcknowledged(P, T),
        TransferReceived(
            T, FIRST, 2 * CHUNK_BYTES, 2, transfer_s=3.0, exposed_s=1.5, chunks=(timing(0, 1.5), timing(1, 0.0))
        ),
    ]
    assert driver.core.num_attempts == 0


def test_a_finish_ahead_of_the_chunks_waits_for_them() -> None:
    driver = Driver(EXPECT)
    events = [finish(), announce(0), announce(1), received(0), ChunkWritten(T, 0), received(1)]
    effects = driver.do(*events, ChunkWritten(T, 1))
    assert effects[-2:] == [SendAcknowledged(P, T), received_at_once()]


def test_only_the_last_chunks_of_a_long_transfer_are_timed() -> None:
    transfer = ReceiverTransfer(T, P, Coverage(PLANNER, 0, 1))
    for seq in range(MAX_TIMED_CHUNKS + 10):
        transfer.note_written(Chunk(seq, 0, 1, seq, seq + 2, 8), float(seq))
    timings = transfer.chunk_timings(MAX_TIMED_CHUNKS + 9.0)
    assert len(timings) == MAX_TIMED_CHUNKS
    assert timings[0] == KvChunkTiming(MAX_TIMED_CHUNKS - 1.0, 0, 1, 2)
    assert timings[-1].before_end_s == 0.0


@pytest.mark.parametrize("state", ExpectationState)
@pytest.mark.parametrize(
    "event", [EXPECT, ExpectationWithdrawn(ATTEMPT, "x"), ChunkWritten(T, 0)], ids=lambda event: type(event).__name__
)
def test_each_attempt_row_is_legal_and_everything_else_raises(event: ReceiverEvent, state: ExpectationState) -> None:
    driver = Driver()
    if state is not ExpectationState.ABSENT:
        driver.do(EXPECT, announce(0), received(0))
    if state is ExpectationState.WITHDRAWN:
        driver.do(ExpectationWithdrawn(ATTEMPT, "x"))
    if (type(event), state) in ATTEMPT_ROWS:
        driver.do(event)
    else:
        with pytest.raises(InvalidTransition, match=r"while|not being written"):
            driver.do(event)


@pytest.mark.parametrize("state", ReceiverPeerState)
@pytest.mark.parametrize("event", [PeerReady(OTHER), PeerLost(OTHER, "gone")], ids=lambda event: type(event).__name__)
def test_each_peer_row_is_legal_and_everything_else_raises(event: ReceiverEvent, state: ReceiverPeerState) -> None:
    driver = Driver()
    if state is not ReceiverPeerState.ABSENT:
        driver.do(PeerReady(OTHER))
    if state is ReceiverPeerState.DROPPING:
        driver.do(ChunkAnnounced(OTHER, T, replace(chunk(0), num_bytes=1)))
    if (type(event), state) in PEER_ROWS:
        driver.do(event)
    else:
        with pytest.raises(InvalidTransition, match="while"):
            driver.do(event)


def test_every_status_has_a_row_for_everything_a_peer_can_say() -> None:
    said = (ChunkAnnounced, ChunkReceived, FinishAnnounced, CancelAnnounced)
    assert set(TRANSFER_ROWS) == {(event, status) for event in said for status in TransferStatus}


def test_what_nobody_expects_is_drained_and_refused_once() -> None:
    driver = Driver()
    refusal = SendCancel(P, UNKNOWN, "not wanted here")
    assert driver.do(announce(0, UNKNOWN)) == [refusal, post(0, UNKNOWN)]
    assert driver.do(announce(1, UNKNOWN), finish(2, UNKNOWN)) == [post(1, UNKNOWN)]
    discards = [DiscardChunk(P, UNKNOWN, 0), DiscardChunk(P, UNKNOWN, 1)]
    assert driver.do(received(0, UNKNOWN), received(1, UNKNOWN)) == discards
    assert driver.do(CancelAnnounced(P, UNKNOWN, "late")) == []


def test_a_transfer_refused_before_it_was_expected_stays_refused() -> None:
    driver = Driver(announce(0))
    assert driver.do(EXPECT, announce(1)) == [post(1)]
    assert driver.do(received(0), received(1)) == [DiscardChunk(P, T, 0), DiscardChunk(P, T, 1)]
    assert driver.do(announce(0, NEWER)) == [post(0, NEWER)]


def test_a_refused_finish_is_answered_once() -> None:
    driver = Driver()
    assert driver.do(finish(2, UNKNOWN), finish(2, UNKNOWN)) == [SendCancel(P, UNKNOWN, "not wanted here")]


def test_an_error_fails_the_transfer_and_the_expectation_stands() -> None:
    driver = Driver(EXPECT, announce(0), announce(1))
    assert driver.do(received(0, error="expected a, got b")) == [DiscardChunk(P, T, 0), *failed("expected a, got b")]
    assert driver.do(received(1)) == [DiscardChunk(P, T, 1)]
    assert driver.do(finish()) == []
    events = [announce(0, NEWER), announce(1, NEWER), received(0, NEWER), received(1, NEWER), finish(2, NEWER)]
    driver.do(*events, ChunkWritten(NEWER, 0))
    assert driver.do(ChunkWritten(NEWER, 1))[0] == SendAcknowledged(P, NEWER)


def test_a_newer_try_supersedes_an_older_one() -> None:
    driver = Driver(PeerReady(OTHER), EXPECT, announce(0))
    effects = driver.do(announce(0, NEWER, OTHER))
    assert effects == [*failed("superseded by try 2"), post(0, NEWER, OTHER)]
    assert driver.do(received(0)) == [DiscardChunk(P, T, 0)]


def test_an_older_try_is_refused() -> None:
    driver = Driver(EXPECT, announce(0, NEWER))
    assert driver.do(announce(0, T)) == [SendCancel(P, T, "not wanted here"), post(0, T)]


def test_a_second_peer_with_the_same_try_is_refused() -> None:
    driver = Driver(PeerReady(OTHER), EXPECT, announce(0))
    assert driver.do(announce(0, T, OTHER)) == [SendCancel(OTHER, T, "not wanted here"), post(0, T, OTHER)]
    assert driver.do(received(0, T, OTHER)) == [DiscardChunk(OTHER, T, 0)]
    assert driver.do(received(0)) == [write(0)]


def test_completion_waits_for_the_writes_of_a_superseded_try() -> None:
    driver = Driver(EXPECT, announce(0), received(0), finish(2, NEWER), announce(0, NEWER), announce(1, NEWER))
    driver.do(received(0, NEWER), received(1, NEWER), ChunkWritten(NEWER, 0))
    assert driver.do(ChunkWritten(NEWER, 1)) == []
    assert driver.do(ChunkWritten(T, 0))[0] == SendAcknowledged(P, NEWER)


def test_a_withdrawal_is_released_only_when_no_write_is_outstanding() -> None:
    driver = Driver(EXPECT, announce(0), announce(1), received(0))
    assert driver.do(ExpectationWithdrawn(ATTEMPT, "client left")) == [SendCancel(P, T, "client left")]
    assert driver.do(received(1)) == [DiscardChunk(P, T, 1)]
    assert driver.do(ExpectationWithdrawn(ATTEMPT, "again")) == []
    assert driver.do(ChunkWritten(T, 0)) == [AttemptReleased(ATTEMPT)]


def test_a_withdrawal_without_writes_is_released_at_once() -> None:
    assert Driver(EXPECT).do(ExpectationWithdrawn(ATTEMPT, "x")) == [AttemptReleased(ATTEMPT)]
    effects = Driver(EXPECT, announce(0)).do(ExpectationWithdrawn(ATTEMPT, "x"))
    assert effects == [SendCancel(P, T, "x"), AttemptReleased(ATTEMPT)]


def test_a_cancel_by_the_sender_fails_the_transfer_and_is_not_answered() -> None:
    driver = Driver(EXPECT, announce(0))
    assert driver.do(CancelAnnounced(P, T, "deadline")) == [
        TransferFailedLocally(T, TransferOutcome.CANCELLED, "deadline")
    ]
    assert driver.do(received(0), announce(1)) == [DiscardChunk(P, T, 0), post(1)]


def test_a_lost_link_fails_its_transfers_and_keeps_writing_what_came() -> None:
    driver = Driver(PeerReady(OTHER), EXPECT, announce(0), received(0))
    assert driver.do(PeerLost(P, "killed")) == [TransferFailedLocally(T, TransferOutcome.LINK_LOST, "killed")]
    assert driver.do(announce(1), finish()) == []
    assert driver.do(announce(0, NEWER, OTHER)) == [post(0, NEWER, OTHER)]
    assert driver.do(ExpectationWithdrawn(ATTEMPT, "x")) == [SendCancel(OTHER, NEWER, "x")]
    assert driver.do(ChunkWritten(T, 0)) == [AttemptReleased(ATTEMPT)]


def test_a_peer_that_comes_back_starts_with_an_empty_window() -> None:
    driver = Driver(EXPECT, announce(0), received(0), announce(1), num_chunks_in_window=1)
    driver.do(PeerLost(P, "killed"), PeerReady(P))
    assert driver.do(announce(0, NEWER)) == [post(0, NEWER)]
    assert driver.do(ChunkWritten(T, 0)) == []


def test_a_window_bounds_what_is_posted_and_staged() -> None:
    driver = Driver(EXPECT, num_chunks_in_window=1)
    assert driver.do(announce(0), announce(1)) == [post(0)]
    assert driver.do(received(0)) == [write(0)]
    assert driver.do(ChunkWritten(T, 0)) == [post(1)]


def test_a_peer_that_announces_far_more_than_the_window_is_dropped() -> None:
    driver = Driver(num_chunks_in_window=1)
    effects = driver.do(*(announce(0, new_transfer_id(f"u{number}")) for number in range(8)))
    assert isinstance(effects[-1], DropPeer)
    assert "announced in a window" in effects[-1].reason


def test_what_the_link_holds_may_be_announced_besides_by_that_peer_alone() -> None:
    """1. four windows and what the link holds; 2. a chunk more ends it; 3. a peer over another link has its windows."""
    driver = Driver(num_chunks_in_window=1)
    driver.do(PeerReady(OTHER, link_bytes=3 * CHUNK_BYTES))
    announced = [announce(0, new_transfer_id(f"u{number}"), OTHER) for number in range(9)]
    assert not any(isinstance(effect, DropPeer) for effect in driver.do(*announced[:8]))
    assert isinstance(driver.do(announced[8])[-1], DropPeer)
    ours = [announce(0, new_transfer_id(f"v{number}")) for number in range(6)]
    assert not any(isinstance(effect, DropPeer) for effect in driver.do(*ours[:5]))
    assert isinstance(driver.do(ours[5])[-1], DropPeer)


@pytest.mark.parametrize(
    "wrong",
    [{"num_bytes": CHUNK_BYTES + 1}, {"layer_end": 3, "num_bytes": 3064}, {"token_start": 10}],
    ids=str,
)
def test_a_chunk_whose_bytes_are_unknown_drops_the_peer_before_any_receive(wrong: dict[str, int]) -> None:
    driver = Driver(EXPECT)
    (effect,) = driver.do(ChunkAnnounced(P, T, replace(chunk(0), **wrong)))
    assert isinstance(effect, DropPeer)
    assert "t/0/1: chunk 0" in effect.reason
    assert driver.do(announce(0)) == []


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        ([chunk(0), replace(chunk(1), seq=2)], "expected chunk 1, announced 2"),
        ([chunk(0), chunk(0)], "expected chunk 1, announced 0"),
        ([chunk(0), replace(chunk(0), seq=1)], "chunk 1: overlaps an earlier one in layer 0"),
        ([replace(chunk(0), token_start=5, token_end=15)], "chunk 0: tokens [5, 15) outside [0, 10)"),
    ],
    ids=str,
)
def test_chunks_that_do_not_tile_the_request_fail_the_transfer(announced: list[Chunk], reason: str) -> None:
    driver = Driver(EXPECT)
    effects = driver.do(*(ChunkAnnounced(P, T, each) for each in announced))
    assert [effect for effect in effects if not isinstance(effect, PostReceive)] == failed(reason)


def test_a_finish_that_counts_other_chunks_than_came_fails_the_transfer() -> None:
    driver = Driver(EXPECT, announce(0), announce(1))
    assert driver.do(finish(1)) == failed("expected 1 chunks, announced 2")
    driver = Driver(EXPECT, finish(1), announce(0))
    assert driver.do(announce(1)) == [*failed("expected 1 chunks, announced one more"), post(1)]


def test_chunks_that_leave_a_hole_are_not_acknowledged() -> None:
    driver = Driver(EXPECT, finish(1), announce(0), received(0))
    assert driver.do(ChunkWritten(T, 0)) == failed("1 chunks do not cover the request")
    assert Driver(EXPECT).do(finish(0)) == failed("0 chunks do not cover the request")


def test_the_number_of_first_tokens_is_checked() -> None:
    expected = failed("expected 1 first tokens, got 0")
    assert Driver(EXPECT, announce(0)).do(FinishAnnounced(P, T, 2, ())) == expected


def test_a_stalled_peer_is_dropped_and_its_silence_counted_from_the_last_chunk() -> None:
    driver = Driver(EXPECT)
    driver.now_s = 3.0
    driver.do(announce(0), announce(1))
    assert driver.core.next_deadline_s() == 8.0
    driver.now_s = 7.0
    driver.do(received(0))
    assert driver.at(11.9) == []
    assert driver.at(12.0) == [DropPeer(P, "nothing received for 5.0 s")]
    assert driver.core.next_deadline_s() is None
    assert driver.do(received(1), ChunkWritten(T, 0)) == [write(1)]
    assert driver.do(PeerLost(P, "dropped")) == [TransferFailedLocally(T, TransferOutcome.LINK_LOST, "dropped")]


def test_a_silent_peer_that_owes_nothing_is_not_dropped() -> None:
    driver = Driver(EXPECT, announce(0), received(0))
    assert driver.at(1e6) == []


def test_a_receive_that_was_not_posted_next_raises_with_the_story() -> None:
    driver = Driver(EXPECT, announce(0), announce(1))
    with pytest.raises(InvalidTransition, match=r"out of order(.|\n)*TransferExpected"):
        driver.do(received(1))


def test_a_repeated_finish_changes_nothing() -> None:
    driver = Driver(EXPECT, finish())
    assert driver.do(finish()) == []
