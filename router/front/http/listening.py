"""Runs uvicorn on a listener that is bound already, inside our own loop."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from router.front.http.connections import Connections
from router.front.http.protocol import GuardedProtocol
from router.request import limits

_SWEEP_INTERVAL_S = 1.0


class HttpServer:
    """uvicorn without its own signal handlers: when to stop is decided by `router.app`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        room: Connections | None = None,
    ) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # its errors print exceptions with their text
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        self._server = _Server(config, room or Connections())

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._server.server_state.connections)

    async def serve(self) -> None:
        """Until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            sweeping = tasks.create_task(self._sweep())
            await self._server.serve(sockets=[self._listener])
            sweeping.cancel()

    async def _sweep(self) -> None:
        """End connections whose request is too slow. One look at all costs less than a timer for each request."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, GuardedProtocol):
                    connection.end_if_late(now_s)

    def stop(self) -> None:
        """Accept nothing more; open connections end within a second."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's, with connections of ours."""

    def __init__(self, config: uvicorn.Config, room: Connections) -> None:
        super().__init__(config)
        self._room = room

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's for bound sockets, with a limit for a TLS handshake: asyncio's own is a minute."""
        await self.lifespan.startup()
        limit_s = limits.HEADER_TIMEOUT_S if self.config.ssl is not None else None
        self.servers = [
            await asyncio.get_running_loop().create_server(
                self._new_connection,
                sock=listener,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=limit_s,
            )
            for listener in sockets or ()
        ]
        self.started = True

    def _new_connection(self) -> GuardedProtocol:
        return GuardedProtocol(
            self._room, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
