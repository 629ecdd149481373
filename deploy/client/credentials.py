"""The keys that commands bring when they ask a router: from the environment or from files, never from a command line.

A command line is there for every user of the machine to read.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from common.values.config import ClusterConfig, RouterSettings
from deploy.config.variables import InvalidSettings

ADMIN_KEY_VARIABLE = "PDSERVE_ROUTER_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE = "PDSERVE_ROUTER_ADMIN_KEY_FILE"
API_KEY_VARIABLE = "PDSERVE_API_KEY"


def admin_key_of_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Empty when there is none."""
    if path := environ.get(ADMIN_KEY_FILE_VARIABLE, ""):
        return _read(path)
    return environ.get(ADMIN_KEY_VARIABLE, "")


def admin_key_of(settings: RouterSettings) -> str:
    """The key of routers with these settings, as those need it who ask them."""
    return _read(settings.admin_key_file) if settings.admin_key_file else settings.admin_key


def api_key_of_environment(environ: Mapping[str, str] = os.environ) -> str:
    """A tenant's key; empty when there is none."""
    return environ.get(API_KEY_VARIABLE, "")


def with_admin_key(config: ClusterConfig) -> ClusterConfig:
    """With API keys and no admin key, one for this run: the cluster must be able to ask its own routers."""
    router = config.router
    if not router.api_keys_file or router.admin_key or router.admin_key_file:
        return config
    return config.model_copy(update={"router": router.model_copy(update={"admin_key": secrets.token_urlsafe(32)})})


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}") from error
