"""Handoff messages survive the way through protobuf, and what has no content is refused."""

import pytest

from common.values.ids import AttemptId, RequestId, TransferId, WorkerRef
from common.values.ranks import WHOLE, Rank
from common.values.request import Fingerprint, SampledToken
from common.wire.pb import handoff_pb2 as pb
from kvtransfer import wire
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelAnnounced,
    CancelledByPeer,
    Chunk,
    ChunkAnnounced,
    FinishAnnounced,
    FirstToken,
    SendAcknowledged,
    SendCancel,
    SendChunk,
    SendFinished,
)
from kvtransfer.session import link_prefix

P, D = WorkerRef("p", "1"), WorkerRef("d", "2")
T = TransferId(AttemptId(RequestId("r/1 x"), 3), 2)
CHUNK = Chunk(seq=9, layer_start=1, layer_end=4, token_start=1 << 20, token_end=(1 << 20) + 7, num_bytes=1 << 33)
TOKENS = (
    FirstToken(0, SampledToken(0)),
    FirstToken(3, SampledToken(49151, -0.5, ((49151, -0.5), (0, -1.25)))),
    FirstToken(1, SampledToken(7, 0.0)),
)


def over_the_wire(request: pb.ConnectRequest) -> pb.ConnectRequest:
    return pb.ConnectRequest.FromString(request.SerializeToString())


def test_what_the_sender_says_arrives_as_the_receivers_events() -> None:
    chunk = wire.request_of(SendChunk(D, T, CHUNK, (1, 2)))
    finished = wire.request_of(SendFinished(D, T, 5, TOKENS))
    cancel = wire.request_of(SendCancel(D, T, "client left"))
    assert [wire.event_of_request(P, over_the_wire(each), "shm") for each in (chunk, finished, cancel)] == [
        ChunkAnnounced(P, T, CHUNK),
        FinishAnnounced(P, T, 5, TOKENS, "shm"),
        CancelAnnounced(P, T, "client left"),
    ]


def test_block_ids_never_cross_the_wire() -> None:
    with_blocks = wire.request_of(SendChunk(D, T, CHUNK, (1, 2)))
    assert with_blocks == wire.request_of(SendChunk(D, T, CHUNK, ()))


def test_what_the_receiver_says_arrives_as_the_senders_events() -> None:
    answers = [wire.response_of(SendAcknowledged(P, T)), wire.response_of(SendCancel(P, T, "withdrawn"))]
    arrived = [pb.ConnectResponse.FromString(answer.SerializeToString()) for answer in answers]
    assert [wire.event_of_response(each) for each in arrived] == [
        AcknowledgedByPeer(T),
        CancelledByPeer(T, "withdrawn"),
    ]


def test_a_hello_carries_who_speaks_and_what_must_be_equal() -> None:
    fingerprint = Fingerprint((("a", "1"), ("b", "2")))
    assert wire.parse_sender_hello(over_the_wire(wire.sender_hello(P, fingerprint, Rank(1, 3)))) == (
        P,
        fingerprint,
        Rank(1, 3),
    )


def test_a_message_without_content_is_refused() -> None:
    with pytest.raises(ValueError, match="got None"):
        wire.event_of_request(P, pb.ConnectRequest(), "shm")
    with pytest.raises(ValueError, match="got hello"):
        wire.event_of_request(P, wire.sender_hello(P, Fingerprint(), WHOLE), "shm")
    with pytest.raises(ValueError, match="got None"):
        wire.event_of_response(pb.ConnectResponse())
    with pytest.raises(ValueError, match="without worker_id or incarnation"):
        wire.parse_sender_hello(wire.sender_hello(WorkerRef("p", ""), Fingerprint(), WHOLE))


def test_the_links_prefix_tells_lives_and_epochs_apart() -> None:
    reborn = WorkerRef("p", "2")
    prefixes = {link_prefix(P, D, "e1"), link_prefix(P, D, "e2"), link_prefix(reborn, D, "e1"), link_prefix(D, P, "e1")}
    assert len(prefixes) == 4
