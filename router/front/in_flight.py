"""The requests that the front ends are answering: what `Abort`, `/load` and a drain look at. Of one event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.values.errors import InvalidRequest, NoReadyPair, PdserveError
from common.values.ids import RequestId
from router.front.service_protocol import GenerationService


@dataclass(slots=True)
class Entry:
    """One request of a tenant. `error`: why we end it ourselves; `is_aborted`: its client asked to end it."""

    request_id: RequestId
    tenant: str
    error: PdserveError | None = None
    is_aborted: bool = False


class InFlight:
    """Owns the entries. After `close` nothing new enters."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._entries: dict[RequestId, Entry] = {}
        self._is_closed = False
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @contextmanager
    def enter(
        self, request_id: RequestId, tenant: str, deadline_s: float, deadline_error: PdserveError
    ) -> Iterator[Entry]:
        """Hold a request for as long as it is answered; it is cancelled in the service when this ends."""
        entry = self._add(request_id, tenant)
        timer = asyncio.get_running_loop().call_later(deadline_s, self._fail, entry, deadline_error)
        try:
            yield entry
        finally:
            timer.cancel()
            self._remove(entry)

    def abort(self, request_id: RequestId, tenant: str) -> bool:
        """End a request as its client asked; False when this tenant has none of this id here."""
        entry = self._entries.get(request_id)
        if entry is None or entry.tenant != tenant:
            return False
        entry.is_aborted = True
        self._service.cancel(request_id)
        return True

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._is_closed = True

    async def drain(self, grace_s: float) -> None:
        """Wait for what is here; what is left after the grace fails with a clear error."""
        if not await self.wait_until_empty(grace_s):
            for entry in list(self._entries.values()):
                self._fail(entry, NoReadyPair("the server is shutting down"))

    async def wait_until_empty(self, limit_s: float) -> bool:
        """True once nothing is in flight; False after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def _add(self, request_id: RequestId, tenant: str) -> Entry:
        if self._is_closed:
            raise NoReadyPair("the server is shutting down", retry_after_s=1.0)
        if request_id in self._entries:
            raise InvalidRequest(f"request_id {request_id!r} is in use", param="request_id")
        entry = self._entries[request_id] = Entry(request_id, tenant)
        self._emptied.clear()
        return entry

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        self._service.cancel(entry.request_id)
        if not self._entries:
            self._emptied.set()

    def _fail(self, entry: Entry, error: PdserveError) -> None:
        entry.error = error
        self._service.cancel(entry.request_id)
