"""The file of API keys: its form, its checks, and what a tenant's cache salt is made of. Pure: no IO.

    cache_salt_secret: 64 hexadecimal digits
    tenants:
      acme:
        keys: [sha256:5e88..., sha256:9b71...]
        limits: {requests_per_minute: 600, tokens_per_minute: 200000, max_concurrent: 32, queue_share: 0.5}

Only hashes of keys are in it. A plain SHA-256 is right here, and a slow password hash would not be: a key is 32 random
bytes, so there is nothing to guess, and the hash is computed for every request.
"""

import hashlib
import hmac
import re
import struct
from collections.abc import Iterator
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same language, the first some ten times as fast
MAX_FILE_BYTES = 1 << 20
HASH_PREFIX = "sha256:"
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
KeyHash = Annotated[str, StringConstraints(pattern=rf"^{HASH_PREFIX}[0-9a-f]{{64}}$")]
Secret = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class InvalidKeyFile(Exception):
    """The file cannot be used; the message says where, and never what stands there."""


class TenantLimits(BaseModel):
    """What a tenant may use of one router; a limit that is not stated does not exist."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt and output tokens")
    max_concurrent: int | None = Field(None, ge=1, description="prompts being answered")
    queue_share: float = Field(1.0, gt=0, le=1, description="of the requests that a router lets wait for workers")


class TenantSettings(BaseModel):
    """One tenant. Tenants of one `cache_group` share cached prefixes; without a group nothing is shared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyHash, ...] = Field((), max_length=64)
    limits: TenantLimits = TenantLimits()
    cache_group: Name | None = None
    may_salt: bool = Field(False, description="may divide its own cache further with cache_salt")
    min_priority: int = Field(0, ge=-100, le=100, description="the earliest place in the queue it may ask for")


class KeyFile(BaseModel):
    """All tenants. Frozen: a change of the file makes another one."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    cache_salt_secret: Secret
    tenants: dict[Name, TenantSettings]

    @model_validator(mode="after")
    def _has_each_key_once(self) -> "KeyFile":
        seen: dict[str, str] = {}
        for name, key_hash in self.key_hashes():
            if seen.setdefault(key_hash, name) != name:
                raise ValueError(f"tenants {seen[key_hash]} and {name} have a key in common")
        return self

    def key_hashes(self) -> Iterator[tuple[str, str]]:
        """(tenant, hash) of every key."""
        for name, tenant in self.tenants.items():
            for key_hash in tenant.keys:
                yield name, key_hash

    def cache_salt(self, name: str) -> bytes:
        """What tells a tenant's cached blocks from everybody else's; it cannot be made without the secret."""
        group = self.tenants[name].cache_group
        return derived_salt(
            bytes.fromhex(self.cache_salt_secret), "tenant" if group is None else "group", group or name
        )


def parse_key_file(data: bytes) -> KeyFile:
    """YAML or JSON. Raises InvalidKeyFile, which says nothing of the content."""
    if len(data) > MAX_FILE_BYTES:
        raise InvalidKeyFile(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        tree = yaml.load(data, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InvalidKeyFile("not YAML" + (f", line {mark.line + 1}" if mark else "")) from None
    try:
        return KeyFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the file"
        raise InvalidKeyFile(f"{_without_hashes(where)}: {_without_hashes(first['msg'])}") from None


def hash_of(key: bytes) -> bytes:
    """Raw SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key).digest()


def derived_salt(secret: bytes, *fields: str) -> bytes:
    """HMAC-SHA256 over length-prefixed fields: no two different lists of fields share an encoding."""
    parts = [field.encode("utf-8", "surrogatepass") for field in fields]
    message = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def _without_hashes(text: str) -> str:
    return re.sub(r"[0-9a-f]{16,}", "(hidden)", text)[:300]
