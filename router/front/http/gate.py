"""Stands before every HTTP endpoint: who asks, what a route needs, and no page of another site. Owns no state.

What a route needs is stated with the route, never read from its path: a path that is no route is not found, and a
route that says nothing does not exist. The check comes before any of the body is read.
"""

from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from common.values.errors import InvalidRequest
from router.front.http.io import TENANT_SCOPE_KEY, Endpoint
from router.tenants.access import ADMIN_KEY_HEADER, Access, Need
from router.tenants.tenants import Tenant

# What a browser says of a request that our own page, or its user, made.
_OWN_SITES = frozenset({"same-origin", "none"})
_ADMIN_KEY = ADMIN_KEY_HEADER.encode()


class CrossSiteRequest(InvalidRequest):
    """A page of another site wants to change something with the browser of an administrator."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    code = "cross_site_request"
    reason = "CROSS_SITE_REQUEST"


class HttpGate:
    """Lets in who may."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def protected(self, endpoint: Endpoint, need: Need) -> Endpoint:
        """`endpoint` for those only who bring what it needs."""
        if need is Need.PUBLIC:
            return endpoint

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            if need is Need.TENANT:
                self._enter(request)
            elif need is Need.OPERATOR:
                self._access.check_operator(*_keys_of(request))
            else:
                _check_site(request)
                self._access.check_admin(*_keys_of(request))
            return await endpoint(request)

        return checked

    def may_know_details(self, request: Request) -> bool:
        """For answers that are public but for their details."""
        return self._access.is_admin(*_keys_of(request))

    def _enter(self, request: Request) -> None:
        authorization, _ = _keys_of(request)
        tenant = request.scope[TENANT_SCOPE_KEY] = self._access.tenant(authorization)
        tenant.count_request()


def tenant_of(request: Request) -> Tenant:
    """Who asks, on a route that needs a tenant."""
    tenant: Tenant = request.scope[TENANT_SCOPE_KEY]
    return tenant


def _keys_of(request: Request) -> tuple[list[bytes], list[bytes]]:
    """The values of `authorization` and of the admin key's own header, as they came."""
    authorization, admin_key = [], []
    for name, value in request.scope["headers"]:
        if name == b"authorization":
            authorization.append(value)
        elif name == _ADMIN_KEY:
            admin_key.append(value)
    return authorization, admin_key


def _check_site(request: Request) -> None:
    if request.method == "POST" and request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        raise CrossSiteRequest("administration is not open to pages of other sites")
