"""Where settings come from: defaults < file < environment < flags. Knows the origin of each value.

A setting is named by its path in `ClusterConfig` (`router.http_port`). Its environment variable is the path in
capitals after PDSERVE_ (PDSERVE_ROUTER_HTTP_PORT); where the last part repeats the section, once is enough
(router.router_id: PDSERVE_ROUTER_ID). A name that does not exist is refused, in the file and in the environment.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.values.config import ClusterConfig
from deploy.config.variables import InvalidSettings, check_variables, env_name, suggestion

_REDACTED = "(hidden)"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it came from: `default`, a file, an environment variable or a flag."""

    path: str
    value: object
    origin: str

    @property
    def shown(self) -> object:
        """The value as it may be printed: no password."""
        if self.path.endswith("_key"):
            return _REDACTED if self.value else ""
        return redact_url(self.value) if isinstance(self.value, str) and self.path == "redis_url" else self.value


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration that a command runs with, and the origin of everything in it."""

    config: ClusterConfig
    values: tuple[Setting, ...]

    def origin(self, path: str) -> str:
        return next(setting.origin for setting in self.values if setting.path == path)


def load_settings(
    flags: Mapping[str, object], config_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Merge the four sources. `flags` maps paths to values; None = the flag was not given. Raises InvalidSettings."""
    check_variables(environ)
    defaults = {path: value for path, value in _leaves(ClusterConfig().model_dump())}
    layers = {path: (value, "default") for path, value in defaults.items()}
    if config_file is not None:
        layers |= {path: (value, str(config_file)) for path, value in _read_file(config_file, defaults).items()}
    for path in defaults:
        name = env_name(path)
        if name in environ:
            layers[path] = (environ[name], name)
    layers |= {path: (value, _flag_name(path)) for path, value in flags.items() if value is not None}
    config = _validated({path: value for path, (value, _) in layers.items()}, layers)
    final = dict(_leaves(config.model_dump()))
    return Settings(config, tuple(Setting(path, final[path], layers[path][1]) for path in defaults))


def tls_flags(directory: Path | None) -> dict[str, object]:
    """Settings that use the certificates that `pdserve certs` puts into a directory; none without one."""
    if directory is None:
        return {}
    folder = directory.expanduser().resolve()
    return {
        "tls.cert_file": f"{folder}/{{role}}.crt",
        "tls.key_file": f"{folder}/{{role}}.key",
        "tls.ca_file": f"{folder}/ca.crt",
        "router.cert_file": f"{folder}/front.crt",
        "router.key_file": f"{folder}/front.key",
    }


def redact_url(url: str) -> str:
    """The URL without its password, wherever redis-py would find one."""
    url = re.sub(r"(?<=[?&]password=)[^&#]*", _REDACTED, url)
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not separator or not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}://{user}:{_REDACTED}@{host}"


def _flag_name(path: str) -> str:
    if path == "model.path":
        return "--model"
    if path.startswith("tls.") or path in ("router.cert_file", "router.key_file"):
        return "--tls"
    return "--" + path.rpartition(".")[2].replace("_", "-")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_file(path: Path, known: Mapping[str, object]) -> dict[str, object]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidSettings(f"{path}: expected settings by name, got {type(tree).__name__}")
    values = {str(name): value for name, value in _leaves(tree)}
    for name in values:
        if name not in known:
            raise InvalidSettings(f"{path}: there is no setting {name!r}{suggestion(name, known)}")
    return values


def _validated(values: Mapping[str, object], layers: Mapping[str, tuple[object, str]]) -> ClusterConfig:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        origin = layers[path][1] if path in layers else "settings"
        raise InvalidSettings(f"{path} (from {origin}): {first['msg']}") from error


def describe(path: str) -> str:
    """What a setting is, as its model says; empty when the name says it all."""
    model: type[BaseModel] = ClusterConfig
    *sections, name = path.split(".")
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return model.model_fields[name].description or ""
