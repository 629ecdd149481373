"""Addresses that people mistake, and what the error says."""

import re
import socket
import threading
from collections.abc import Iterator

import pytest

from deploy.client import addresses
from deploy.client.addresses import InvalidAddress, grpc_address, mistaken_server, mistaken_url, router_url
from tests.ports import free_port


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/ui/", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("https://pd.example.com", "https://pd.example.com"),
    ],
)
def test_an_url_is_taken_as_it_is_printed_somewhere(text: str, url: str) -> None:
    assert router_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "http://", "http://h:99999", "http://h:x", "ftp://h", "http://h/other", "http://h:0"]
)
def test_what_can_be_no_url_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(InvalidAddress, match=re.escape(f"--url: expected http://HOST:PORT of a router, got {text!r}")):
        router_url(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h:50051", ("h:50051", False)),
        ("http://h:50051", ("h:50051", False)),
        ("grpc://h:50051/", ("h:50051", False)),
        ("https://[::1]:50051", ("[::1]:50051", True)),
    ],
)
def test_a_server_may_come_with_a_scheme(text: str, address: tuple[str, bool]) -> None:
    assert grpc_address(text) == address


@pytest.mark.parametrize("text", ["h", "h:99999", "http://h:1/v1", ""])
def test_what_can_be_no_server_is_refused(text: str) -> None:
    with pytest.raises(InvalidAddress, match="--server: expected HOST:PORT"):
        grpc_address(text)


HTTP, GRPC, TLS = b"HTTP/1.1 200 OK\r\n", b"\0\0\x18\x04\0\0\0\0\0", b"\x15\x03\x01\0\x02\x02\x16"


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that sends the given bytes on every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(request.param)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("listener", "scheme", "sentence"),
    [
        (GRPC, "http", "{} is a gRPC port; --url takes the HTTP port"),
        (TLS, "http", "{} speaks TLS: give --url https://{}"),
        (HTTP, "https", "{} speaks HTTP without TLS: give --url http://{}"),
        (HTTP, "http", "what answers at http://{} is no router of pdserve"),
        (b"220 smtp\r\n", "http", "what answers at http://{} is no router of pdserve"),
    ],
    indirect=["listener"],
)
def test_an_url_of_something_else_is_explained(listener: str, scheme: str, sentence: str) -> None:
    assert mistaken_url(f"{scheme}://{listener}").startswith(sentence.replace("{}", listener))


@pytest.mark.parametrize(
    ("listener", "is_tls", "sentence"),
    [
        (HTTP, False, "{} is an HTTP port; --server takes the gRPC port"),
        (TLS, False, "{} speaks TLS: give --server https://{}"),
        (GRPC, True, "{} speaks gRPC without TLS: give --server {}"),
        (b"", False, "what answers at {} is no router of pdserve"),
    ],
    indirect=["listener"],
)
def test_a_server_of_something_else_is_explained(listener: str, is_tls: bool, sentence: str) -> None:
    assert mistaken_server(listener, is_tls=is_tls).startswith(sentence.replace("{}", listener))


def test_where_nothing_listens_up_is_asked_for() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert addresses.listener_at(address, 0) == "nothing"
    for sentence in (mistaken_url(f"http://{address}"), mistaken_server(address, is_tls=False)):
        assert "is pdserve up running?" in sentence
