"""A file of keys with tenants of every kind, and access through it."""

from typing import Any

from deploy.cli.keys import hash_line, new_key
from router.tenants.access import Access, AdminKey
from router.tenants.key_file import KeyFile
from router.tenants.tenants import Tenants

ADMIN = "admin-" + "k" * 40
ACME, ACME_OLD, OTHER = new_key(), new_key(), new_key()
SECRET = "ab" * 32
MAX_NUM_QUEUED = 8


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key_file(**settings: Any) -> KeyFile:
    """Tenants acme, with two keys and `settings`, and other."""
    acme = {"keys": [hash_line(ACME), hash_line(ACME_OLD)], **settings}
    return KeyFile.model_validate(
        {"cache_salt_secret": SECRET, "tenants": {"acme": acme, "other": {"keys": [hash_line(OTHER)]}}}
    )


def access(file: KeyFile | None = None, clock: Clock | None = None, admin_key: str = ADMIN) -> Access:
    tenants = Tenants(MAX_NUM_QUEUED, clock=clock or Clock())
    tenants.update(file or key_file())
    return Access(tenants, AdminKey(admin_key))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
