"""Addresses as text, IPv6 included."""

import pytest

from common.values.addresses import dialable, is_wildcard, join_address


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("[fd00::2]", "[fd00::2]:80"), ("node-1", "node-1:80")],
)
def test_an_ipv6_host_is_put_into_brackets_before_its_port(host: str, address: str) -> None:
    assert join_address(host, 80) == address


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", True), ("::", True), ("[::]", True), ("", True), ("127.0.0.1", False), ("n", False)],
)
def test_an_address_that_nobody_can_dial_is_known(host: str, expected: bool) -> None:
    assert is_wildcard(host) is expected


def test_the_machine_itself_reaches_a_wildcard_by_loopback() -> None:
    assert [dialable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]
