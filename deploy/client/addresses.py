"""Addresses of a router as people give them: what they mean, and what is there when it is not what was meant."""

import socket
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from common.values.errors import PdserveError

_PROBE_LIMIT_S = 2.0
_PROBE = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_TLS_ALERT = b"\x15\x03"
_HTTP2_SETTINGS = 4  # RFC 9113, 6.5: the type of the first frame that a server sends
# What `pdserve up` prints after the port, and what a browser shows.
_PATHS = ("", "/v1", "/ui")

Listener = Literal["nothing", "HTTP", "gRPC", "TLS", "something else"]


class InvalidAddress(PdserveError):
    """An address that cannot be one of a router; the message says what is expected."""


def router_url(text: str) -> str:
    """`http://HOST:PORT` of `--url`; the scheme may be missing, and what up and the page show after it may be there."""
    expected = f"--url: expected http://HOST:PORT of a router, got {text!r}"
    parts = _split(text, "http", expected)
    if parts.scheme not in ("http", "https") or parts.path.rstrip("/") not in _PATHS or parts.query:
        raise InvalidAddress(expected)
    return f"{parts.scheme}://{parts.netloc}"


def grpc_address(text: str) -> tuple[str, bool]:
    """`HOST:PORT` of `--server`, and whether it is spoken to with TLS (`https://HOST:PORT`)."""
    expected = f"--server: expected HOST:PORT of a router's gRPC API, got {text!r}"
    parts = _split(text, "http", expected)
    if parts.scheme not in ("http", "https", "grpc") or parts.path.rstrip("/") or parts.port is None:
        raise InvalidAddress(expected)
    return parts.netloc, parts.scheme == "https"


def mistaken_url(url: str) -> str:
    """Why nothing of ours answers at `--url`: one sentence."""
    address = urlsplit(url).netloc
    match listener_at(address, 443 if url.startswith("https:") else 80):
        case "nothing":
            return f"nothing answers at {url}: is pdserve up running? (--url or $PDSERVE_URL names another address)"
        case "gRPC":
            return f"{address} is a gRPC port; --url takes the HTTP port, which is http://HOST:8000 by default"
        case "TLS":
            return f"{address} speaks TLS: give --url https://{address}"
        case "HTTP" if url.startswith("https:"):
            return f"{address} speaks HTTP without TLS: give --url http://{address}"
        case _:
            return f"what answers at {url} is no router of pdserve"


def mistaken_server(address: str, *, is_tls: bool) -> str:
    """Why nothing of ours answers at `--server`: one sentence."""
    match listener_at(address, 50051):
        case "nothing":
            return f"nothing answers at {address}: is pdserve up running? (--server or $PDSERVE_SERVER names another)"
        case "HTTP":
            return f"{address} is an HTTP port; --server takes the gRPC port, which is HOST:50051 by default"
        case "TLS":
            return f"{address} speaks TLS: give --server https://{address}"
        case "gRPC" if is_tls:
            return f"{address} speaks gRPC without TLS: give --server {address}"
        case _:
            return f"what answers at {address} is no router of pdserve"


def listener_at(address: str, default_port: int) -> Listener:
    """What listens there, by the first bytes that it says."""
    parts = urlsplit(f"//{address}")
    try:
        with socket.create_connection((parts.hostname, parts.port or default_port), _PROBE_LIMIT_S) as connection:
            connection.sendall(_PROBE)
            said = connection.recv(16)
    except (OSError, UnicodeError):
        return "nothing"
    if said.startswith(b"HTTP/1"):
        return "HTTP"
    if said.startswith(_TLS_ALERT):
        return "TLS"
    return "gRPC" if len(said) > 3 and said[3] == _HTTP2_SETTINGS else "something else"


def _split(text: str, scheme: str, expected: str) -> SplitResult:
    """The parts of a URL whose scheme may be missing. Raises InvalidAddress for one that has no host or a bad port."""
    try:
        parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
        if not parts.hostname or parts.port == 0:
            raise InvalidAddress(expected)
    except ValueError as error:
        raise InvalidAddress(f"{expected} ({error})") from error
    return parts
