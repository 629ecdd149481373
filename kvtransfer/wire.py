"""Handoff messages as values and as protobuf. The only place of this package that knows `handoff_pb2`. Pure: no IO.

Whatever a peer sends is checked here for shape: a message without content raises ValueError.
"""

from common.values.ids import AttemptId, RequestId, TransferId, WorkerRef
from common.values.ranks import Rank
from common.values.request import Fingerprint, SampledToken
from common.wire.pb import handoff_pb2 as pb
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

Announcement = ChunkAnnounced | FinishAnnounced | CancelAnnounced
Answer = AcknowledgedByPeer | CancelledByPeer


def request_of(effect: SendChunk | SendFinished | SendCancel) -> pb.ConnectRequest:
    """Sender to receiver."""
    transfer_id = _transfer_id_to_pb(effect.transfer_id)
    match effect:
        case SendChunk():
            return pb.ConnectRequest(chunk=_chunk_to_pb(transfer_id, effect.chunk))
        case SendFinished():
            tokens = [_first_token_to_pb(token) for token in effect.tokens]
            finished = pb.PrefillFinished(transfer_id=transfer_id, num_chunks=effect.num_chunks, first_tokens=tokens)
            return pb.ConnectRequest(finished=finished)
        case SendCancel():
            return pb.ConnectRequest(cancel=pb.CancelTransfer(transfer_id=transfer_id, reason=effect.reason))


def event_of_request(peer: WorkerRef, request: pb.ConnectRequest, transport: str) -> Announcement:
    """Inverse of `request_of`, as seen by the receiver. `transport`: of the link to that peer."""
    match request.WhichOneof("message"):
        case "chunk":
            return ChunkAnnounced(peer, _transfer_id(request.chunk.transfer_id), _chunk(request.chunk))
        case "finished":
            finished = request.finished
            tokens = tuple(_first_token(token) for token in finished.first_tokens)
            transfer_id, rate = _transfer_id(finished.transfer_id), max(0.0, finished.link_bytes_per_s)
            return FinishAnnounced(peer, transfer_id, finished.num_chunks, tokens, transport, rate)
        case "cancel":
            return CancelAnnounced(peer, _transfer_id(request.cancel.transfer_id), request.cancel.reason)
        case other:
            raise ValueError(f"expected chunk, finished or cancel, got {other}")


def response_of(effect: SendAcknowledged | SendCancel) -> pb.ConnectResponse:
    """Receiver to sender."""
    transfer_id = _transfer_id_to_pb(effect.transfer_id)
    match effect:
        case SendAcknowledged():
            return pb.ConnectResponse(acknowledged=pb.Acknowledged(transfer_id=transfer_id))
        case SendCancel():
            return pb.ConnectResponse(cancel=pb.CancelTransfer(transfer_id=transfer_id, reason=effect.reason))


def event_of_response(response: pb.ConnectResponse) -> Answer:
    """Inverse of `response_of`, as seen by the sender."""
    match response.WhichOneof("message"):
        case "acknowledged":
            return AcknowledgedByPeer(_transfer_id(response.acknowledged.transfer_id))
        case "cancel":
            return CancelledByPeer(_transfer_id(response.cancel.transfer_id), response.cancel.reason)
        case other:
            raise ValueError(f"expected acknowledged or cancel, got {other}")


def sender_hello(ref: WorkerRef, fingerprint: Fingerprint, rank: Rank) -> pb.ConnectRequest:
    hello = pb.SenderHello(
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        fingerprint=dict(fingerprint.fields),
        rank=rank.rank,
        world_size=rank.world_size,
    )
    return pb.ConnectRequest(hello=hello)


def parse_sender_hello(request: pb.ConnectRequest) -> tuple[WorkerRef, Fingerprint, Rank]:
    """Raises ValueError unless it is a hello with a worker id, an incarnation and a rank."""
    if not request.HasField("hello"):
        raise ValueError(f"expected hello, got {request.WhichOneof('message')}")
    hello = request.hello
    if not (hello.worker_id and hello.incarnation):
        raise ValueError("hello without worker_id or incarnation")
    fingerprint = Fingerprint(tuple(sorted(hello.fingerprint.items())))
    return WorkerRef(hello.worker_id, hello.incarnation), fingerprint, Rank(hello.rank, hello.world_size)


def _transfer_id_to_pb(transfer_id: TransferId) -> pb.TransferId:
    attempt_id = transfer_id.attempt_id
    return pb.TransferId(
        request_id=attempt_id.request_id, attempt=attempt_id.attempt, prefill_try=transfer_id.prefill_try
    )


def _transfer_id(message: pb.TransferId) -> TransferId:
    return TransferId(AttemptId(RequestId(message.request_id), message.attempt), message.prefill_try)


def _chunk_to_pb(transfer_id: pb.TransferId, chunk: Chunk) -> pb.ChunkAnnounced:
    return pb.ChunkAnnounced(
        transfer_id=transfer_id,
        seq=chunk.seq,
        layer_start=chunk.layer_start,
        layer_end=chunk.layer_end,
        token_start=chunk.token_start,
        token_end=chunk.token_end,
        num_bytes=chunk.num_bytes,
        group_idx=chunk.group_idx,
        shard_start=chunk.shard_start,
        shard_end=chunk.shard_end,
    )


def _chunk(message: pb.ChunkAnnounced) -> Chunk:
    return Chunk(
        message.seq,
        message.layer_start,
        message.layer_end,
        message.token_start,
        message.token_end,
        message.num_bytes,
        message.group_idx,
        message.shard_start,
        message.shard_end,
    )


def _first_token_to_pb(first: FirstToken) -> pb.FirstToken:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in first.token.top]
    return pb.FirstToken(
        choice_idx=first.choice_idx, token_id=first.token.token_id, logprob=first.token.logprob, top=top
    )


def _first_token(message: pb.FirstToken) -> FirstToken:
    logprob = message.logprob if message.HasField("logprob") else None
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return FirstToken(message.choice_idx, SampledToken(message.token_id, logprob, top))
