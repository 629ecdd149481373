"""Who may call which method between components: by the role in the caller's certificate. What is not listed, no role.

router    streams to workers, and asks for their books
prefill   streams to decode workers
operator  asks for books
"""

import inspect
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from common.telemetry.logs import get_logger
from common.tls.identity import Component, Identity, certificate_name
from common.wire.pb import handoff_pb2, worker_pb2

_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_HANDOFF = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name

ADMITTED: Mapping[str, frozenset[Component]] = {
    f"/{_WORKER}/Connect": frozenset({Component.ROUTER}),
    f"/{_WORKER}/Audit": frozenset({Component.ROUTER, Component.OPERATOR}),
    f"/{_HANDOFF}/Connect": frozenset({Component.PREFILL}),
}
# Of the caller's certificate. Its other alternative names (URI, e-mail) may look like a role and mean none.
_DNS_NAMES = "peer_dns"
# grpc.aio's handlers and contexts have no types.
Handler = Any
Context = Any


def interceptors(identity: Identity) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """What a component's server asks of every call: nothing without certificates."""
    return (RoleGuard(identity.namespace, ADMITTED),) if identity.has_certificate else ()


class RoleGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Lets a call through to its handler if its caller's certificate names a role that the method admits."""

    def __init__(self, namespace: str, admitted: Mapping[str, frozenset[Component]]) -> None:
        self._namespace = namespace
        self._admitted = admitted

    async def intercept_service(self, continuation: Any, details: Any) -> Handler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        allowed = self._admitted.get(details.method, frozenset())

        async def check(context: Context) -> None:
            roles = roles_of(context.auth_context().get(_DNS_NAMES, ()), self._namespace)
            if not roles & allowed:
                text = f"{details.method} is for {_names(allowed)}; the certificate of the caller names {_names(roles)}"
                get_logger().warning("call_refused", method=details.method, roles=sorted(roles), peer=context.peer())
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

        return _guarded(handler, check)


def roles_of(names: Iterable[bytes], namespace: str) -> frozenset[Component]:
    """The roles that a certificate's DNS names give its holder in a cluster."""
    found = set(names)
    return frozenset(part for part in Component if certificate_name(part, namespace).encode() in found)


def _names(components: Iterable[Component]) -> str:
    return " or ".join(sorted(components)) or "no role"


def _guarded(handler: Handler, check: Any) -> Handler:
    """The same handler behind `check`. Handlers are coroutines, or generators that yield the responses."""
    kind = "stream" if handler.request_streaming else "unary"
    kind += "_stream" if handler.response_streaming else "_unary"
    inner = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        await check(context)
        return await inner(request, context)

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        await check(context)
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    guarded = generate if inspect.isasyncgenfunction(inner) else call
    return make(guarded, handler.request_deserializer, handler.response_serializer)
