"""The one tree of errors that cross a boundary, each with its gRPC and HTTP face. Pure: no IO.

Three kinds, never mixed: a bug is an `AssertionError` or `InvalidTransition` and ends the process; a peer or
the network is a `PeerError` and becomes an event or a retry; a caller's fault is an `InvalidRequest` (4xx).
Messages never hold prompt text: they state what was expected, what came, and ids.
"""


class PdserveError(Exception):
    """Base. `reason` is google.rpc.ErrorInfo.reason; `error_type` and `code` are OpenAI's body fields."""

    http_status = 500
    grpc_code = "INTERNAL"
    error_type = "internal_error"
    code = "internal_error"
    reason = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(PdserveError):
    """The caller sent something that can never work. `param` names the field."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "invalid_value"
    reason = "INVALID_VALUE"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"
    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unsupported(InvalidRequest):
    """A field of the API that pdserve knows but does not offer yet: refused by name, never ignored."""

    code = "unsupported_parameter"
    reason = "UNSUPPORTED_PARAMETER"


class BodyTooLarge(InvalidRequest):
    http_status = 413
    code = "body_too_large"
    reason = "BODY_TOO_LARGE"


class ModelNotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "not_found_error"
    code = "model_not_found"
    reason = "MODEL_NOT_FOUND"


class RequestNotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "not_found_error"
    code = "request_not_found"
    reason = "REQUEST_NOT_FOUND"


class WorkerNotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "not_found_error"
    code = "worker_not_found"
    reason = "WORKER_NOT_FOUND"


class InvalidApiKey(PdserveError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "authentication_error"
    code = "invalid_api_key"
    reason = "INVALID_API_KEY"


class RateLimited(PdserveError):
    """A tenant's own limit is reached; others are served. Carries `retry_after_s`."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    reason = "QUOTA"


class Overloaded(PdserveError):
    """A queue bound is reached; admitted work goes on. Carries `retry_after_s`."""

    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "server_overloaded"
    code = "queue_full"
    reason = "QUEUE_FULL"


class NoReadyPair(PdserveError):
    """No prefill and decode worker that can pair, or this process is draining."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable"
    code = "no_ready_pair"
    reason = "NO_READY_PAIR"


class WorkerFailed(PdserveError):
    """A worker or a transfer was lost and the retries are used up."""

    grpc_code = "ABORTED"
    code = "worker_lost"
    reason = "WORKER_LOST"


class DeadlineExceeded(PdserveError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "deadline_exceeded"
    reason = "DEADLINE_EXCEEDED"


class RequestCancelled(PdserveError):
    """Somebody asked to end the request: its own client, or an operator."""

    http_status = 499
    grpc_code = "CANCELLED"
    error_type = "cancelled_error"
    code = "request_cancelled"
    reason = "REQUEST_CANCELLED"


class PeerError(PdserveError):
    """Another process of ours, or the network to it, failed. Never reaches a client as it is."""


class InvalidTransition(AssertionError):
    """A bug of ours: a core got a local event that its state does not allow. Carries the key's history."""
