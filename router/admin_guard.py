"""Who may administer: holders of the admin key, if one is set, and no page of another site. Owns the key's hash."""

import hashlib
import hmac
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidApiKey, InvalidRequest
from router.http_io import Endpoint

ADMIN_KEY_HEADER = "x-admin-key"
# What a browser says of a request that our own page, or its user, made.
_OWN_SITES = frozenset({"same-origin", "none"})


class CrossSiteRequest(InvalidRequest):
    """A page of another site wants to change something with the browser of somebody who may."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    code = "cross_site_request"
    reason = "CROSS_SITE_REQUEST"


class AdminGuard:
    """Stands before every administration endpoint. An empty key lets everybody in who can reach the port."""

    def __init__(self, key: str) -> None:
        self._digest = _digest(key) if key else None

    def protected(self, endpoint: Endpoint) -> Endpoint:
        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            self._check(request)
            return await endpoint(request)

        return checked

    def _check(self, request: Request) -> None:
        if request.method == "POST" and request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
            raise CrossSiteRequest("administration is not open to pages of other sites")
        if self._digest is not None and not hmac.compare_digest(self._digest, _digest(_given_key(request))):
            raise InvalidApiKey(f"administration needs the admin key, as a bearer token or in {ADMIN_KEY_HEADER}")


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get(ADMIN_KEY_HEADER, "")


def _digest(key: str) -> bytes:
    """Of equal length whatever the key is, so that comparing tells nothing about it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
