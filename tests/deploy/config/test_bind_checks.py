"""Where pdserve listens beyond loopback only with TLS or with somebody's word."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.tls.files import InvalidCertificate
from common.values.config import ClusterConfig, TlsSettings
from deploy.config.bind_checks import check_router, check_worker, check_worker_host, is_loopback
from deploy.config.settings import load_settings, tls_flags
from deploy.config.variables import InvalidSettings
from tests.certificates import new_certs

OUTSIDE = ("0.0.0.0", "::", "10.0.0.1", "pdserve.example.org", "192.168.1.2", "128.0.0.1", "")
INSIDE = ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost")


@pytest.mark.parametrize(("host", "expected"), [*((h, False) for h in OUTSIDE), *((h, True) for h in INSIDE)])
def test_loopback_is_what_no_other_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def config_of(**flags: object) -> ClusterConfig:
    return load_settings({name.replace("__", "."): value for name, value in flags.items()}, environ={}).config


@pytest.mark.parametrize("host", OUTSIDE)
def test_an_open_router_without_tls_is_refused_and_told_what_to_do(host: str) -> None:
    with pytest.raises(InvalidSettings, match=r"router\.host is .*router\.cert_file.*or --insecure if"):
        check_router(config_of(router__host=host))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_open_worker_without_tls_is_refused(role: str) -> None:
    config = config_of(**{f"{role}_worker__host": "10.0.0.1"})
    with pytest.raises(InvalidSettings, match=rf"{role}_worker\.host is 10\.0\.0\.1.*tls\.cert_file"):
        check_worker(config, role)
    check_worker(config, "decode" if role == "prefill" else "prefill")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_worker_is_refused_an_address_that_nobody_can_dial(host: str) -> None:
    """It is what the worker registers; where the network is trusted, too."""
    with pytest.raises(InvalidSettings, match=r"cannot connect to it\. Give the address of this machine"):
        check_worker(config_of(decode_worker__host=host, insecure=True), "decode")


def test_tls_or_somebodys_word_opens_the_addresses(tmp_path: Path) -> None:
    opened = {"router.host": "0.0.0.0", "prefill_worker.host": "10.0.0.1", "decode_worker.host": "10.0.0.1"}
    for way in (tls_flags(new_certs(tmp_path)), {"insecure": True}):
        config = load_settings({**opened, **way}, environ={}).config
        check_router(config)
        check_worker(config, "prefill")
        check_worker(config, "decode")


def test_mutual_tls_alone_does_not_open_the_public_ports(tmp_path: Path) -> None:
    flags = {name: value for name, value in tls_flags(new_certs(tmp_path)).items() if name.startswith("tls.")}
    with pytest.raises(InvalidSettings, match=r"router\.host"):
        check_router(load_settings({**flags, "router.host": "0.0.0.0"}, environ={}).config)


@pytest.mark.parametrize(
    ("missing", "refused"),
    [("router.key", "router"), ("front.crt", "router"), ("ca.crt", "router"), ("decode.crt", "decode")],
)
def test_certificates_that_cannot_be_used_are_named_before_anything_starts(
    tmp_path: Path, missing: str, refused: str
) -> None:
    config = load_settings(tls_flags(new_certs(tmp_path)), environ={}).config
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidCertificate, match=missing):
        check_router(config) if refused == "router" else check_worker(config, refused)


def test_an_address_that_a_node_gave_is_checked_as_one_that_was_configured() -> None:
    with pytest.raises(InvalidSettings, match=r"the worker's address is 10\.0\.0\.7"):
        check_worker_host("10.0.0.7", TlsSettings(), insecure=False)
    check_worker_host("10.0.0.7", TlsSettings(), insecure=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--config", "{config}"),
        ("router", "--host", "0.0.0.0", "--redis-url", "redis://127.0.0.1:1"),
        ("worker", "--role", "decode", "--worker-id", "d", "--host", "10.0.0.1", "--redis-url", "redis://127.0.0.1:1"),
    ],
)
def test_the_commands_refuse_before_they_start_anything(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("decode_worker: {host: 10.0.0.1}")
    command = [sys.executable, "-m", "deploy.cli", *(text.format(config=path) for text in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert ".host is " in done.stderr
    assert ": others can connect, and nothing is encrypted" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("given", [{"cert_file": "a"}, {"key_file": "a"}, {"cert_file": "a", "key_file": "b"}])
def test_certificate_settings_go_together(given: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings, match="go together"):
        load_settings({f"tls.{name}": value for name, value in given.items()}, environ={})
