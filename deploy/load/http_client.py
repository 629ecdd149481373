"""A small HTTP/1.1 client for streamed answers: one connection per request, nothing between the socket and the clock.

A general client costs more time per event than a small model does per token, and that would be measured as latency.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from deploy.client.tls import trusting_ca

_MAX_LINE = 1 << 20
_MAX_BODY = 64 << 20


class HttpFailed(Exception):
    """No answer, or one that is no success; the message says which."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask. `base` is the path before /v1."""

    host: str
    port: int
    is_tls: bool
    base: str
    api_key: str = ""

    @classmethod
    def of(cls, url: str, api_key: str = "") -> "Endpoint":
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise HttpFailed(f"not an HTTP address ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpFailed("not an HTTP address")
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base, api_key)

    def head(self, method: str, path: str, num_body_bytes: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {num_body_bytes}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


async def fetch(endpoint: Endpoint, method: str, path: str, body: bytes = b"") -> bytes:
    """A whole answer. Raises HttpFailed."""
    content = bytearray()
    async for data in stream(endpoint, method, path, body):
        content += data
        if len(content) > _MAX_BODY:
            raise HttpFailed(f"the answer is longer than {_MAX_BODY} bytes")
    return bytes(content)


async def stream(endpoint: Endpoint, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
    """The body of an answer, as it comes. Raises HttpFailed, also when it is cut short."""
    try:
        tls = trusting_ca() if endpoint.is_tls else None
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls, limit=_MAX_LINE)
    except OSError as error:
        raise HttpFailed(f"no connection to {endpoint.host}:{endpoint.port}: {error.strerror or error}") from error
    try:
        writer.write(endpoint.head(method, path, len(body)) + body)
        await writer.drain()
        async for data in _answer(reader):
            yield data
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise HttpFailed(f"the answer broke off: {type(error).__name__}") from error
    finally:
        writer.close()


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events; comments and field names are dropped."""
    rest = b""
    async for chunk in chunks:
        rest += chunk.replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip()


async def _answer(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    status, headers = await _head(reader)
    body = _body(reader, headers)
    if status == 200:
        async for data in body:
            yield data
        return
    content = b"".join([data async for data in body])[:500]
    raise HttpFailed(f"HTTP {status}: {content.decode(errors='replace')}")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readline()
    parts = status_line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise HttpFailed("the server closed the connection" if not status_line else "the answer is not HTTP/1.1")
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while data := await reader.read(_MAX_LINE):
        yield data
