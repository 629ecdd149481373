"""The LoRA adapters that the cluster serves as models of their own, by name.

Owns what this router knows of them; requests take the adapter along, so one that is unloaded meanwhile still ends.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint import CheckpointError, ModelSpec
from common.checkpoint.adapters import open_adapter
from common.values.errors import InvalidRequest
from common.values.request import Adapter
from router.request import limits


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """`is_configured`: named when the router was started."""

    name: str
    adapter: Adapter
    created_s: int  # Unix time
    is_configured: bool = False


class ServedAdapters:
    """`add`, `remove` and `replace_others` in the event loop's thread; `read` in any."""

    def __init__(self, spec: ModelSpec | None = None, base_name: str = "") -> None:
        """None = the model's shape is not known: no adapter can be read."""
        self._spec = spec
        self._base_name = base_name
        self._by_name: dict[str, ServedAdapter] = {}

    @classmethod
    def of(cls, named: Sequence[str], spec: ModelSpec, base_name: str) -> "ServedAdapters":
        """Of "NAME=DIRECTORY", as configured. Raises CheckpointError."""
        adapters = cls(spec, base_name)
        for each in named:
            name, _, path = each.partition("=")
            try:
                adapters.add(adapters.read(name, path, is_configured=True))
            except InvalidRequest as error:
                raise CheckpointError(f"router.lora {each!r}: {error.message}") from error
        return adapters

    @property
    def all(self) -> tuple[ServedAdapter, ...]:
        """By name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))

    def get(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def read(self, name: str, path: str, *, is_configured: bool = False) -> ServedAdapter:
        """Look at an adapter's files. Raises InvalidRequest, which names the field or the tensor that is wrong."""
        if not 0 < len(name) <= limits.MAX_REQUEST_ID_LENGTH or not name.isprintable():
            raise InvalidRequest(f"name must be 1 to {limits.MAX_REQUEST_ID_LENGTH} characters", param="name")
        if name == self._base_name:
            raise InvalidRequest(f"{name!r} is the name of the model itself", param="name")
        if self._spec is None:
            raise InvalidRequest("adapters cannot be read here", param="path")
        try:
            directory = Path(path).expanduser().resolve()
            files = open_adapter(directory, self._spec)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="path") from error
        except (OSError, ValueError, RuntimeError) as error:  # no path, nobody's home, not ours to read
            raise InvalidRequest(f"path cannot be read: {type(error).__name__}", param="path") from error
        return ServedAdapter(name, Adapter(files.digest, str(directory)), int(time.time()), is_configured)

    def add(self, served: ServedAdapter) -> None:
        """Serve it. Raises InvalidRequest when another has its name, or there are too many."""
        known = self._by_name.get(served.name)
        if known is not None and known.adapter != served.adapter:
            raise InvalidRequest(f"another adapter is named {served.name!r}: unload it first", param="name")
        if known is None and len(self._by_name) >= limits.MAX_ADAPTERS:
            raise InvalidRequest(f"{limits.MAX_ADAPTERS} adapters are named already, which is the most", param="name")
        self._by_name.setdefault(served.name, served)

    def remove(self, name: str) -> None:
        """Serve it no more. Raises InvalidRequest when the configuration names it."""
        served = self._by_name[name]
        if served.is_configured:
            raise InvalidRequest(f"adapter {name!r} is named by router.lora: change the configuration", param="name")
        del self._by_name[name]

    def replace_others(self, found: Mapping[str, ServedAdapter]) -> None:
        """What all routers share, beside what is configured here, which wins."""
        own = {name: served for name, served in self._by_name.items() if served.is_configured}
        self._by_name = {**found, **own}
