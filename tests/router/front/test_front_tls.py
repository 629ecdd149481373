"""TLS on the public ports: the certificate follows its files."""

import asyncio
import socket
import ssl
from pathlib import Path

import grpc
import pytest
from starlette.responses import PlainTextResponse

from router.front.http.listening import HttpServer
from router.front.ports import bind
from router.front.tls import grpc_credentials, http_context
from router.request import limits
from tests.certificates import new_certs

SCOPE = "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    return new_certs(tmp_path / "tls")


def files(directory: Path) -> tuple[str, str]:
    return f"{directory}/front.crt", f"{directory}/front.key"


def seen_certificate(port: int, ca: Path, name: str | None = "localhost") -> bytes:
    """What a client that checks the CA sees; without a name it does not check one."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = name is not None
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


async def test_http_is_served_over_tls_with_the_certificate_that_is_mounted_now(mounted: Path) -> None:
    server = HttpServer(PlainTextResponse("well"), bind("127.0.0.1", 0, "--http-port"), http_context(*files(mounted)))
    serving = asyncio.create_task(server.serve())
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=ssl.create_default_context(cafile=f"{mounted}/ca.crt"),
            server_hostname="localhost",
        )  # fmt: skip
        writer.write(SCOPE.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        first = await asyncio.to_thread(seen_certificate, server.port, mounted / "ca.crt")
        assert first == await asyncio.to_thread(seen_certificate, server.port, mounted / "ca.crt", None)
        new_certs(mounted)
        second = await asyncio.to_thread(seen_certificate, server.port, mounted / "ca.crt")
        assert second != first
        assert second == ssl.PEM_cert_to_DER_cert((mounted / "front.crt").read_text())
        assert second == await asyncio.to_thread(seen_certificate, server.port, mounted / "ca.crt", None)
        writer.write(SCOPE.encode())  # on the connection that stood before
        await reader.readuntil(b"well")
        writer.close()
    finally:
        server.stop()
        await serving


async def test_a_client_in_the_clear_gets_no_answer(mounted: Path) -> None:
    server = HttpServer(PlainTextResponse("well"), bind("127.0.0.1", 0, "--http-port"), http_context(*files(mounted)))
    serving = asyncio.create_task(server.serve())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(SCOPE.encode())
        assert b"well" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
    finally:
        server.stop()
        await serving


async def test_a_handshake_that_is_never_made_is_given_up(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.2)
    server = HttpServer(PlainTextResponse("well"), bind("127.0.0.1", 0, "--http-port"), http_context(*files(mounted)))
    serving = asyncio.create_task(server.serve())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    finally:
        server.stop()
        await serving


async def test_grpc_is_served_over_tls_to_clients_without_a_certificate(mounted: Path) -> None:
    server = grpc.aio.server()
    credentials = grpc_credentials(*files(mounted))
    assert credentials is not None
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    trusted = grpc.ssl_channel_credentials((mounted / "ca.crt").read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    first = await asyncio.to_thread(seen_certificate_h2, port, mounted / "ca.crt")
    new_certs(mounted)
    assert await asyncio.to_thread(seen_certificate_h2, port, mounted / "ca.crt") != first
    await server.stop(None)


def seen_certificate_h2(port: int, ca: Path) -> bytes:
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


def test_without_certificate_there_is_no_tls() -> None:
    assert grpc_credentials("", "") is None
    assert http_context("", "") is None
