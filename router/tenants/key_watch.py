"""Keys from files while the router runs: read at the start, and again when a file changes. No restart for a new key.

A file that is wrong at the start stops the start. One that becomes wrong later changes nothing: the keys that were in
force stay in force, and the log and a metric say so. Owns no key.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from common.telemetry.logs import get_logger
from common.values.config import RouterConfig
from router.observe.error_reports import internal_error
from router.observe.request_metrics import RouterMetrics
from router.tenants.access import Access, AdminKey
from router.tenants.key_file import MAX_FILE_BYTES, InvalidKeyFile, parse_key_file
from router.tenants.tenants import Tenants

# A key counts, or counts no more, this long after its file has changed, and the time of reading. Mounted secrets are
# replaced by renaming, often on file systems without notifications: looking is what works everywhere.
INTERVAL_S = 1.0
ContentT = TypeVar("ContentT")


class UnreadableKeyFile(InvalidKeyFile):
    """Nothing was read: the file is away, or this process has no descriptors left. The next try may succeed."""


class WatchedFile(Generic[ContentT]):
    """A file that is read again whenever it has changed. `parse` runs beside the event loop, `apply` in it."""

    def __init__(self, path: str, parse: Callable[[bytes], ContentT], apply: Callable[[ContentT], None]) -> None:
        self._path = Path(path)
        self._parse = parse
        self._apply = apply
        self._seen: object = None
        self._told = ""

    def read(self) -> None:
        """Raises InvalidKeyFile."""
        self._seen = self._mark()
        self._apply(self._load())

    async def read_if_changed(self) -> None:
        """As `read`; one fault is reported once. What could not be read, not even as wrong, is tried again."""
        mark = self._mark()
        if mark == self._seen:
            self._told = ""
            return
        try:
            self._apply(await asyncio.to_thread(self._load))
        except UnreadableKeyFile as error:
            if str(error) == self._told:
                return
            self._told = str(error)
            raise
        except InvalidKeyFile:
            self._seen = mark
            raise
        self._seen, self._told = mark, ""

    def _load(self) -> ContentT:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise UnreadableKeyFile(f"{self._path}: {error.strerror}") from error
        try:
            return self._parse(data)
        except InvalidKeyFile as error:
            raise InvalidKeyFile(f"{self._path}: {error}") from None

    def _mark(self) -> object:
        """What differs when the file does; a link that leads to another file counts as a change."""
        with contextlib.suppress(OSError):
            status = os.stat(self._path)
            return status.st_ino, status.st_mtime_ns, status.st_size
        return None


@asynccontextmanager
async def keys_in_force(config: RouterConfig, metrics: RouterMetrics) -> AsyncIterator[Access]:
    """Who may call what, kept up to date while this is open. Raises InvalidKeyFile."""
    tenants, admin_key = Tenants(config.max_num_queued, metrics), AdminKey(config.admin_key)
    files: list[WatchedFile[Any]] = []
    if config.api_keys_file:
        files.append(WatchedFile(config.api_keys_file, parse_key_file, tenants.update))
    if config.admin_key_file:
        files.append(WatchedFile(config.admin_key_file, admin_key_of, admin_key.update))
    for file in files:
        file.read()
    watching = asyncio.create_task(_watch(files, metrics), name="keys")
    try:
        yield Access(tenants, admin_key)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def admin_key_of(data: bytes) -> str:
    """The key in a file of its own: what stands there, without the line's end. Raises InvalidKeyFile."""
    key = data.decode("utf-8", "surrogateescape").strip()
    if not key:
        raise InvalidKeyFile("empty")
    return key


async def _watch(files: Sequence[WatchedFile[Any]], metrics: RouterMetrics) -> None:
    while files:
        await asyncio.sleep(INTERVAL_S)
        for file in files:
            try:
                await file.read_if_changed()
            except InvalidKeyFile as error:
                metrics.inc("pdserve_key_file_errors")
                get_logger().error("key_file_refused", problem=str(error))
            except Exception as error:  # a bug must not end the watch: a key that is withdrawn later must go
                metrics.inc("pdserve_key_file_errors")
                internal_error(error)
