"""Our channels on a machine whose environment names a proxy."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from common.wire import grpc_options
from common.wire.grpc_options import channel_options, peer_server_options, server_options
from tests.ports import free_port
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_channel_of_ours_uses_no_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens where the proxy would be."""
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            grpc.channel_ready_future(channel).result(timeout=LIMIT_S)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n", b"\x16\x03\x01"])
def test_a_connection_that_does_not_come_to_speak_http_2_is_ended(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_options, "HANDSHAKE_LIMIT_MS", 200)
    server = grpc.server(ThreadPoolExecutor(1), options=peer_server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as half_open:
            half_open.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while half_open.recv(4096):
                    pass
    finally:
        server.stop(None).wait()
