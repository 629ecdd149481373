"""Stands before every gRPC method: who asks, and what a method needs. Owns the table of handlers.

The check is made on the metadata alone, before the message is read. A method that is not in `NEEDS` does not exist.
Messages have a time to come in (`router.front.grpc.punctual`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from common.values.errors import InvalidApiKey, PdserveError, RateLimited
from common.wire.pb import generation_pb2 as pb
from common.wire.undecodable import refuse_undecodable
from router.front.grpc.errors import Context, abort
from router.front.grpc.punctual import punctual
from router.tenants.access import ADMIN_KEY_HEADER, Access, Need
from router.tenants.tenants import Tenant

HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_GENERATION_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_OF_OPERATORS = frozenset({"GetClusterState", "WatchClusterState"})
NEEDS: Mapping[str, Need] = {
    **{f"/{HEALTH_NAME}/{name}": Need.PUBLIC for name in ("Check", "Watch", "List")},
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Need.TENANT,
    **{
        f"/{_GENERATION_NAME}/{method.name}": Need.OPERATOR if method.name in _OF_OPERATORS else Need.TENANT
        for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    },
}


class GrpcGate(grpc.GenericRpcHandler):  # type: ignore[misc]  # the package has no types
    """Takes the servicers' handlers as a server would, and hands one out to those only who may call it."""

    def __init__(self, access: Access, note_refusal: Callable[[PdserveError], None]) -> None:
        self._access = access
        self._note_refusal = note_refusal
        self._handlers: dict[str, Any] = {}

    def service(self, handler_call_details: Any) -> Any:
        """The method's handler, or one that says why not; None: there is no such method."""
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            return None
        try:
            self._check(NEEDS[handler_call_details.method], handler_call_details.invocation_metadata)
        except (InvalidApiKey, RateLimited) as error:
            self._note_refusal(error)
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, error))
        return handler

    def tenant(self, context: Context) -> Tenant:
        """Who makes this call. Raises InvalidApiKey when the key was withdrawn meanwhile."""
        authorization, _ = _keys_of(context.invocation_metadata())
        return self._access.tenant(authorization)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """What generated code calls on a server."""
        for name, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{name}"] = punctual(refuse_undecodable(handler))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """The same handlers once more, without their names."""

    def _check(self, need: Need, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        authorization, admin_key = _keys_of(metadata)
        if need is Need.TENANT:
            self._access.tenant(authorization).count_request()
        elif need is not Need.PUBLIC:
            self._access.check_operator(authorization, admin_key)


async def _refuse(error: PdserveError, request_iterator: object, context: Context) -> None:
    await abort(context, error)


def _keys_of(metadata: Sequence[tuple[str, str | bytes]] | None) -> tuple[list[bytes], list[bytes]]:
    """The values of `authorization` and of the admin key's own entry, as they came."""
    authorization: list[bytes] = []
    admin_key: list[bytes] = []
    for name, value in metadata or ():
        if name == "authorization":
            authorization.append(_raw(value))
        elif name == ADMIN_KEY_HEADER:
            admin_key.append(_raw(value))
    return authorization, admin_key


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
