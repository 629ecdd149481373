"""Reading requests and writing errors over HTTP, the same way on every route. Owns no state."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from common.values.errors import BodyTooLarge, InvalidApiKey, InvalidRequest, PdserveError
from router.front.openai.responses import ErrorBody, ErrorInfo
from router.observe.error_reports import internal_error
from router.request import limits
from router.tenants.tenants import Tenant

JSON = "application/json"
REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-s"
_SCOPE_KEY = "pdserve.request_id"
TENANT_SCOPE_KEY = "pdserve.tenant"
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_HEADER_LENGTH}}}")

Endpoint = Callable[[Request], Awaitable[Response]]
_encoder = msgspec.json.Encoder()
_NO_HEADERS: Mapping[str, str] = {}


class UnsupportedMediaType(InvalidRequest):
    http_status = 415
    code = "unsupported_media_type"
    reason = "UNSUPPORTED_MEDIA_TYPE"


class BodyTimeout(InvalidRequest):
    http_status = 408
    code = "body_timeout"
    reason = "BODY_TIMEOUT"


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, JSON)


def error_body(error: PdserveError) -> ErrorBody:
    return ErrorBody(ErrorInfo(error.message, error.error_type, error.param, error.code))


def error_response(error: PdserveError, request_id: str, rates: Mapping[str, str] = _NO_HEADERS) -> Response:
    """`rates`: what the tenant has left of its limits, as headers."""
    headers = {REQUEST_ID_HEADER: request_id, **rates}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1e3)))
    if isinstance(error, InvalidApiKey):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | UnsupportedMediaType | BodyTimeout):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_response(error_body(error), error.http_status, headers)


def guarded(endpoint: Endpoint, note_refusal: Callable[[PdserveError], None]) -> Endpoint:
    """Answer errors in OpenAI's form; no exception leaves, and none shows its text."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PdserveError as error:
            note_refusal(error)
            return error_response(error, request_id_of(request), rates_of(request.scope))
        except Exception as error:
            return error_response(internal_error(error), request_id_of(request))

    return answer


def rates_of(scope: Scope) -> dict[str, str]:
    """What the tenant has left of its limits, as headers; nothing before the tenant is known."""
    tenant: Tenant | None = scope.get(TENANT_SCOPE_KEY)
    return {} if tenant is None else tenant.headers()


def request_id_of(request: Request) -> str:
    """The client's X-Request-Id, echoed when it is printable and short, else a new one; the same for a request."""
    stated = request.headers.get(REQUEST_ID_HEADER, "")
    if _REQUEST_ID.fullmatch(stated):
        return stated
    if _SCOPE_KEY not in request.scope:
        request.scope[_SCOPE_KEY] = f"req-{secrets.token_hex(12)}"
    return str(request.scope[_SCOPE_KEY])


def deadline_of(request: Request) -> float | None:
    """Seconds that the client gives us, or None."""
    stated = request.headers.get(TIMEOUT_HEADER)
    if stated is None:
        return None
    try:
        return float(stated.replace("_", "?"))  # Python's own way to group digits is not HTTP's
    except ValueError:
        message = f"{TIMEOUT_HEADER} must be a number of seconds"
        raise InvalidRequest(message, param=TIMEOUT_HEADER) from None


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request. Raises when it is something else, too large or too slow."""
    try:
        _check_headers(request, max_bytes)
        async with asyncio.timeout(limits.BODY_TIMEOUT_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {limits.BODY_TIMEOUT_S:g} s") from None
    except (BodyTooLarge, UnsupportedMediaType):
        await _discard(request)
        raise


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"content-type must be {JSON}", param="content-type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("content-encoding is not supported", param="content-encoding")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client left before the body was complete")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def _discard(request: Request) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.DISCARD_TIMEOUT_S):
            while num_bytes < limits.MAX_DISCARDED_BYTES:
                message = await request.receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes (router.max_body_bytes)")
