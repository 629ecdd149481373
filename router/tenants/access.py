"""Who may call what, the same over both APIs. Owns the admin key's hash; tenants own theirs.

    PUBLIC    probes and the page's files: everybody
    TENANT    generation and what belongs to it: an API key, where there is a file of keys
    OPERATOR  metrics, load, the state of the cluster: the admin key, where there is a file of keys
    ADMIN     administration: the admin key, where there is one or a file of keys

An administrator is no tenant and a tenant no administrator: each key opens its own doors only. With a file of keys and
no admin key, what needs an admin key is closed to everybody.
"""

import hmac
from collections.abc import Sequence
from enum import Enum

from common.values.errors import InvalidApiKey
from router.tenants.key_file import hash_of
from router.tenants.tenants import Tenant, Tenants

ADMIN_KEY_HEADER = "x-admin-key"
_SCHEME = b"Bearer "


class Need(Enum):
    """What a call needs."""

    PUBLIC = "public"
    TENANT = "tenant"
    OPERATOR = "operator"
    ADMIN = "admin"


class AdminKey:
    """The hash of the admin key. An empty key is none."""

    def __init__(self, key: str = "") -> None:
        self.update(key)

    def update(self, key: str) -> None:
        self._digest = hash_of(key.encode("utf-8", "surrogateescape")) if key else None

    @property
    def is_set(self) -> bool:
        return self._digest is not None

    def matches(self, given: bytes) -> bool:
        return self._digest is not None and hmac.compare_digest(self._digest, hash_of(given))


class Access:
    """Decides by what a call brings: the values of its `authorization` and `x-admin-key` headers or metadata."""

    def __init__(self, tenants: Tenants, admin_key: AdminKey) -> None:
        self.tenants = tenants
        self._admin_key = admin_key

    def tenant(self, authorization: Sequence[bytes]) -> Tenant:
        """Raises InvalidApiKey."""
        if self.tenants.are_open:
            return self.tenants.of(b"")
        return self.tenants.of(_bearer(authorization))

    def check_operator(self, authorization: Sequence[bytes], admin_key: Sequence[bytes]) -> None:
        """Raises InvalidApiKey."""
        if not self.tenants.are_open:
            self.check_admin(authorization, admin_key)

    def check_admin(self, authorization: Sequence[bytes], admin_key: Sequence[bytes]) -> None:
        """Raises InvalidApiKey."""
        if self.tenants.are_open and not self._admin_key.is_set:
            return
        if not self._admin_key.is_set:
            raise InvalidApiKey("administration is closed: this router has no admin key")
        if not self._admin_key.matches(admin_key[0] if len(admin_key) == 1 else _bearer(authorization)):
            raise InvalidApiKey(f"administration needs the admin key, as a bearer token or in {ADMIN_KEY_HEADER}")

    def is_admin(self, authorization: Sequence[bytes], admin_key: Sequence[bytes]) -> bool:
        """Whether details may be shown."""
        try:
            self.check_operator(authorization, admin_key)
        except InvalidApiKey:
            return False
        return True


def _bearer(authorization: Sequence[bytes]) -> bytes:
    """The token of the one Authorization header. Raises InvalidApiKey."""
    if len(authorization) != 1:
        problem = "no API key was given" if not authorization else "more than one Authorization header was given"
        raise InvalidApiKey(f"{problem}; send it as: Authorization: Bearer KEY")
    if not authorization[0].startswith(_SCHEME) or len(authorization[0]) == len(_SCHEME):
        raise InvalidApiKey("the Authorization header must read: Bearer KEY")
    return authorization[0][len(_SCHEME) :]
