"""`pdserve keys`: makes API keys. A key is shown once; what is kept is its hash.

A key is 256 random bits, so it cannot be guessed and a plain SHA-256 of it is enough: slow hashes are for passwords,
which people choose.
"""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.config.variables import InvalidSettings
from router.tenants.key_file import HASH_PREFIX, InvalidKeyFile, KeyFile, hash_of, parse_key_file

KEY_PREFIX = "pds-"
_SECRET_BYTES = 32


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_line(key: str) -> str:
    """The key as the file holds it."""
    return HASH_PREFIX + hash_of(key.encode()).hex()


def run_new(tenant: str, file: Path | None) -> None:
    """`pdserve keys new`: the key goes to stdout and nothing else does, so that it can be piped to where it belongs."""
    key = new_key()
    line = hash_line(key)
    if file is None:
        _tell(f"add this hash below tenants.{tenant}.keys:\n\n    - {line}\n\nthe key, shown once:\n")
    else:
        _write(file, _with_key(_tree_of(file), tenant, line))
        _tell(f"{file} has the hash; running routers take it up by themselves. The key, shown once:\n")
    print(key)


def run_list(file: Path, tenant: str = "") -> None:
    """`pdserve keys list`: tenants, or one of them, and enough of each hash to find it again."""
    try:
        tenants = _parsed(file, file.read_bytes()).tenants
    except OSError as error:
        raise InvalidSettings(f"{file}: {error.strerror}") from error
    if tenant and tenant not in tenants:
        raise InvalidSettings(f"{file}: no tenant {tenant!r} is there")
    for name, settings in tenants.items():
        if tenant not in ("", name):
            continue
        print(f"{name}: {len(settings.keys)} keys")
        for line in settings.keys:
            print(f"  {line[: len(HASH_PREFIX) + 12]}...")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _tree_of(file: Path) -> dict[str, Any]:
    """What is there, checked; of a file that is not there yet, one without tenants."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {"cache_salt_secret": secrets.token_hex(_SECRET_BYTES), "tenants": {}}
    _parsed(file, data)
    tree: dict[str, Any] = yaml.safe_load(data)
    return tree


def _parsed(file: Path, data: bytes) -> KeyFile:
    try:
        return parse_key_file(data)
    except InvalidKeyFile as error:
        raise InvalidSettings(f"{file}: {error}") from None


def _with_key(tree: dict[str, Any], tenant: str, line: str) -> dict[str, Any]:
    settings = tree["tenants"].setdefault(tenant, {}) or {}
    tree["tenants"][tenant] = {**settings, "keys": [*settings.get("keys", ()), line]}
    return tree


def _write(file: Path, tree: dict[str, Any]) -> None:
    """All or nothing: routers may be reading. For the owner's eyes only."""
    text = yaml.safe_dump(tree, sort_keys=False)
    _parsed(file, text.encode())
    with _temporary(file.parent) as temporary:
        temporary.write_text(text)
        os.replace(temporary, file)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=folder, prefix=".keys-")  # mode 0600
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
