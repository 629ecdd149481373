"""Ends gRPC calls whose messages do not come: gRPC waits for them for ever, and the connection keeps its place as long.

A call looks the same to its client: that a method takes one message is no part of what is on the wire.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from router.front.grpc.errors import Context
from router.request import limits


def punctual(handler: Any) -> Any:
    """The method behind `handler`, a handler of grpc's, for clients that send each message in time."""
    if handler.request_streaming:
        behavior = partial(_many, handler.stream_stream)
    else:
        behavior = partial(_single, handler.unary_stream or handler.unary_unary)
    return grpc.stream_stream_rpc_method_handler(behavior, handler.request_deserializer, handler.response_serializer)


async def _single(method: Any, requests: AsyncIterator[Any], context: Context) -> None:
    response = await method(await _next(requests, context), context)
    if response is not None:  # a method that streams has written what it has to say
        await context.write(response)


async def _many(method: Any, requests: AsyncIterator[Any], context: Context) -> None:
    async for response in method(_in_time(requests, context), context):
        await context.write(response)


async def _in_time(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    while (request := await _next(requests, context, may_end=True)) is not None:
        yield request


async def _next(requests: AsyncIterator[Any], context: Context, *, may_end: bool = False) -> Any:
    """The next message; None: there is none, and need not be. Ends the call when it does not come."""
    try:
        async with asyncio.timeout(limits.BODY_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        if may_end:
            return None
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
    except TimeoutError:
        message = f"no message within {limits.BODY_TIMEOUT_S:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
    raise AssertionError("abort always raises")
