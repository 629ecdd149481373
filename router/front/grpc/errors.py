"""Errors as gRPC status with google.rpc details, and the guard around every handler. Owns no state."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyPb
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common.values.errors import InvalidRequest, PdserveError
from router.front.grpc.responses import duration_pb
from router.observe.error_reports import internal_error

DOMAIN = "pdserve"
# What grpc gives its handlers has no types.
Context = Any
ServicerT = TypeVar("ServicerT", bound="NotesRefusals")
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT")


class NotesRefusals(Protocol):
    """A servicer that counts what it refuses."""

    def note_refusal(self, error: PdserveError) -> None: ...


def status_of(error: PdserveError) -> status_pb2.Status:
    """ErrorInfo always; BadRequest when a field is to blame; RetryInfo when trying again makes sense."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequest) and error.param:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb(error.retry_after_s)))
    code = getattr(grpc.StatusCode, error.grpc_code).value[0]
    return status_pb2.Status(code=code, message=error.message, details=[_packed(detail) for detail in details])


async def abort(context: Context, error: PdserveError) -> None:
    """End the call with `error`. Never returns."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))


def guarded(
    handler: Callable[[ServicerT, RequestT, Context], Awaitable[ResponseT]],
) -> Callable[[ServicerT, RequestT, Context], Awaitable[ResponseT | None]]:
    """No exception leaves a handler as it is: its text would reach the client."""

    @wraps(handler)
    async def answer(servicer: ServicerT, request: RequestT, context: Context) -> ResponseT | None:
        try:
            return await handler(servicer, request, context)
        except PdserveError as error:
            servicer.note_refusal(error)
            await abort(context, error)
        except Exception as error:
            await abort(context, internal_error(error))
        return None

    return answer


def _packed(detail: Message) -> AnyPb:
    packed = AnyPb()
    packed.Pack(detail)
    return packed
