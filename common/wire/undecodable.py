"""Messages that cannot be decoded end their call with INVALID_ARGUMENT: gRPC would say UNKNOWN, in Python's words.

Whatever else the handler then says of the call is too late. Owns no state.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.values.errors import PeerError

# What grpc.aio gives handlers has no types.
Context = Any
Handler = Any
_UNDECODABLE = object()


class RefuseUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """For all methods of a server."""

    async def intercept_service(self, continuation: Any, details: Any) -> Handler | None:
        handler = await continuation(details)
        return None if handler is None else refuse_undecodable(handler)


def refuse_undecodable(handler: Handler) -> Handler:
    """The same method. Handlers are coroutines, or generators that yield the responses."""
    kind = "stream" if handler.request_streaming else "unary"
    kind += "_stream" if handler.response_streaming else "_unary"
    inner = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        decoded = _Decoded(request, context)
        with decoded.in_charge():
            return await inner(await decoded.request(), context)

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        decoded = _Decoded(request, context)
        with decoded.in_charge():
            async with aclosing(inner(await decoded.request(), context)) as responses:
                async for response in responses:
                    yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behavior = generate if inspect.isasyncgenfunction(inner) else call
    return make(behavior, _tolerant(handler.request_deserializer), handler.response_serializer)


class _Decoded:
    """The messages of a call, until one cannot be decoded."""

    def __init__(self, request: Any, context: Context) -> None:
        self._request = request
        self._context = context
        self._is_refused = False

    async def request(self) -> Any:
        """What the handler gets: the message, or an iterator over the messages."""
        return self if hasattr(self._request, "__anext__") else await self._checked(self._request)

    @contextlib.contextmanager
    def in_charge(self) -> Any:
        """Nothing that the handler raises counts after a refusal: the call has its status."""
        try:
            yield
        except Exception:
            if not self._is_refused:
                raise

    def __aiter__(self) -> "_Decoded":
        return self

    async def __anext__(self) -> Any:
        return await self._checked(await anext(self._request))

    async def _checked(self, message: Any) -> Any:
        if message is not _UNDECODABLE:
            return message
        self._is_refused = True
        with contextlib.suppress(grpc.aio.AbortError):
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be decoded")
        raise PeerError("a message that cannot be decoded")


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNDECODABLE

    return tolerant
