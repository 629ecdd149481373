"""Addresses as text. Pure: no IO."""

import ipaddress


def join_address(host: str, port: int) -> str:
    """`host:port`; an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """True for an address that one can listen on and not connect to from elsewhere: 0.0.0.0, ::, or nothing."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def dialable(host: str) -> str:
    """The address at which this machine itself reaches who listens on `host`."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"
