"""One write to a connection per turn of the event loop: an answer's head and body, or all events of a step.

Owns what was written in the turn. A write costs two system calls' time, ours and the one that wakes the client.
"""

import asyncio
from typing import Any


class GatheringTransport:
    """What uvicorn's protocol uses of a transport. Everything but writing is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    @property
    def num_unsent(self) -> int:
        """Bytes that the client, and the kernel for it, have not taken; those of this turn not counted."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send with everything else of this turn, at its end."""
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written.append(data)

    def flush(self) -> None:
        """Send now what was written: nothing more comes in this turn."""
        if self._written and not self._transport.is_closing():
            self._transport.write(b"".join(self._written))
        self._written.clear()

    def close(self) -> None:
        """After what was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """At once, and without what was written."""
        self._written.clear()
        self._transport.abort()

    def evict(self) -> None:
        """As `close`; when nothing is left to send, at once: a TLS client is not asked to agree."""
        self.flush()
        if self.num_unsent:
            self._transport.close()
        else:
            self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.flush()
        self._transport.set_protocol(protocol)
