"""Router <-> worker messages between their two forms, values of `common.values.messages` and protobuf, and in batches.

All that is queued travels in one message of gRPC, in order: a write costs some 50 us of processor time on each side
whatever it carries (Zen 4, 2026-11). What a peer sends that is no message of ours becomes a PeerError. Owns no state.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from common.values.errors import PeerError
from common.values.messages import RouterMessage, WorkerMessage
from common.wire.codec import Codec, derive
from common.wire.pb import worker_pb2 as pb

# As many prompts of a million tokens still fit into one message.
MAX_BATCHED = 16
ItemT = TypeVar("ItemT")


async def take_batch(queue: "asyncio.Queue[ItemT]") -> list[ItemT]:
    """What is queued, at most MAX_BATCHED items; waits for the first, and for what else the loop's turn brings."""
    batch = [await queue.get()]
    await asyncio.sleep(0)
    while len(batch) < MAX_BATCHED and not queue.empty():
        batch.append(queue.get_nowait())
    return batch


def router_messages_to_pb(messages: Sequence[RouterMessage]) -> pb.ConnectRequest:
    if len(messages) == 1:
        return router_message_to_pb(messages[0])
    return pb.ConnectRequest(batch=pb.RouterMessages(messages=map(router_message_to_pb, messages)))


def router_messages_from_pb(request: pb.ConnectRequest) -> list[RouterMessage]:
    """Raises PeerError when one of them is empty or malformed."""
    each = request.batch.messages if request.HasField("batch") else (request,)
    return list(map(router_message_from_pb, each))


def router_message_to_pb(message: RouterMessage) -> pb.ConnectRequest:
    name, encode = _ROUTER_ENCODERS[type(message)]
    return pb.ConnectRequest(**{name: encode(message)})


def router_message_from_pb(request: pb.ConnectRequest) -> RouterMessage:
    """Raises PeerError when the message is empty or malformed."""
    message: RouterMessage = _decoded(request, _ROUTER_DECODERS)
    return message


def worker_messages_to_pb(messages: Sequence[WorkerMessage]) -> pb.ConnectResponse:
    if len(messages) == 1:
        return worker_message_to_pb(messages[0])
    return pb.ConnectResponse(batch=pb.WorkerMessages(messages=map(worker_message_to_pb, messages)))


def worker_messages_from_pb(response: pb.ConnectResponse) -> list[WorkerMessage]:
    """Raises PeerError when one of them is empty or malformed."""
    each = response.batch.messages if response.HasField("batch") else (response,)
    return list(map(worker_message_from_pb, each))


def worker_message_to_pb(message: WorkerMessage) -> pb.ConnectResponse:
    name, encode = _WORKER_ENCODERS[type(message)]
    return pb.ConnectResponse(**{name: encode(message)})


def worker_message_from_pb(response: pb.ConnectResponse) -> WorkerMessage:
    """Raises PeerError when the message is empty or malformed."""
    message: WorkerMessage = _decoded(response, _WORKER_DECODERS)
    return message


def _decoded(message: Any, decoders: dict[str, Callable[[Any], Any]]) -> Any:
    kind = message.WhichOneof("message")
    if kind not in decoders:  # none, or a batch within a batch
        raise PeerError("a peer sent a message of no known kind")
    return decoders[kind](getattr(message, kind))


def _codecs(union: Any, envelope: Descriptor) -> dict[str, tuple[type, Codec[Any, Any]]]:
    """Field of the envelope -> class and codec of what it carries; the classes have the names of the messages."""
    classes = {kind.__name__: kind for kind in get_args(union)}
    messages: dict[str, Any] = {field.name: field.message_type for field in envelope.fields if field.name != "batch"}
    if differing := classes.keys() ^ {message.name for message in messages.values()}:
        raise TypeError(f"{envelope.full_name} and its values differ in {sorted(differing)}")
    return {
        name: (classes[message.name], derive(classes[message.name], GetMessageClass(message)))
        for name, message in messages.items()
    }


_ROUTER = _codecs(RouterMessage, pb.ConnectRequest.DESCRIPTOR)
_WORKER = _codecs(WorkerMessage, pb.ConnectResponse.DESCRIPTOR)
_ROUTER_ENCODERS, _WORKER_ENCODERS = (
    {kind: (name, codec.encode) for name, (kind, codec) in codecs.items()} for codecs in (_ROUTER, _WORKER)
)
_ROUTER_DECODERS, _WORKER_DECODERS = (
    {name: codec.decode for name, (_, codec) in codecs.items()} for codecs in (_ROUTER, _WORKER)
)
