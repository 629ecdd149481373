"""Our environment variables: those of settings, and the few others. A misspelt one is refused, as a YAML key is.

Without yaml: every command checks this first.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from common.values.config import ClusterConfig

ENV_PREFIX = "PDSERVE_"
# Variables of ours that are not settings and that child processes need.
INHERITED = ("PDSERVE_SESSION", "PDSERVE_CACHE", "PDSERVE_LOG_LEVEL", "PDSERVE_NATIVE_OPS")
_OTHERS = (
    *INHERITED,
    *("PDSERVE_URL", "PDSERVE_SERVER", "PDSERVE_API_KEY"),  # of commands that ask a router
    *("PDSERVE_REDIS_PASSWORD", "PDSERVE_VALKEY_PASSWORD"),  # parts of a URL, in the chart and in compose.yaml
)
# What Kubernetes sets in every pod for a Service of our name.
_SERVICE_LINK = re.compile(
    r"PDSERVE_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")


class InvalidSettings(Exception):
    """A setting that does not exist or cannot have its value; the message names it and where it was made."""


def env_name(path: str) -> str:
    """The environment variable of a setting."""
    section, _, name = path.rpartition(".")
    is_repeated = section != "" and name.startswith(f"{section}_")
    return ENV_PREFIX + (name if is_repeated else path.replace(".", "_")).upper()


def setting_paths(model: type[BaseModel] = ClusterConfig, prefix: str = "") -> Iterator[str]:
    """Every setting, as its path in the configuration."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise InvalidSettings for a PDSERVE_ variable that does not exist: it was meant to do something."""
    known = {*_OTHERS, *map(env_name, setting_paths())}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX) and name not in known and not _is_service_link(name, value):
            raise InvalidSettings(f"there is no variable {name}{suggestion(name, known, ENV_PREFIX)}")


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?`, or where to look when none is near; `prefix` is common to all and says nothing."""
    rest = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), rest, n=1)
    return f"; did you mean {prefix + near[0]!r}?" if near else "; pdserve config show lists them"


def _is_service_link(name: str, value: str) -> bool:
    is_url = name.endswith("_PORT") and _SERVICE_URL.match(value) is not None
    return is_url or _SERVICE_LINK.fullmatch(name) is not None
