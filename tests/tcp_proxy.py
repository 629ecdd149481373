"""A TCP proxy on loopback that can go silent, slow or away; it counts what it did, so a test can prove its fault."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Forwards to one target. Change `is_silent` and `delay_s` at any time; `cut` drops all connections."""

    def __init__(self, target_port: int) -> None:
        self.is_silent = False
        self.delay_s = 0.0
        self.num_connections = 0
        self.num_bytes_swallowed = 0
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Drop every connection that is open."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        with suppress(OSError, asyncio.CancelledError):
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(target_writer)
            await asyncio.gather(self._forward(reader, target_writer), self._forward(target_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.is_silent:
                    self.num_bytes_swallowed += len(data)
                    continue
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def tcp_proxy(target_port: int) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
