"""`pdserve certs`: what it writes, and that it can be run again."""

import contextlib
import shutil
import ssl
import stat
from pathlib import Path

import pytest

from common.tls.files import CertificateFiles
from common.tls.identity import Component
from deploy.cli.certs import CertsFailed, make_certs
from tests.certificates import new_certs

NAMES = (*Component, "front")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return new_certs(tmp_path / "tls")


def alternative_names(path: Path) -> set[tuple[str, str]]:
    # The one decoder in the standard library; its tests use it, too.
    return set(ssl._ssl._test_decode_cert(str(path))["subjectAltName"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_each_certificate_belongs_to_its_key_and_is_signed_by_the_ca(made: Path, name: str) -> None:
    assert CertificateFiles(f"{made}/{name}.crt", f"{made}/{name}.key", f"{made}/ca.crt").current().key
    issuer = ssl._ssl._test_decode_cert(f"{made}/{name}.crt")["issuer"]  # type: ignore[attr-defined]
    assert issuer == ssl._ssl._test_decode_cert(f"{made}/ca.crt")["subject"]  # type: ignore[attr-defined]


def test_a_components_certificate_names_its_role_and_cluster_alone(made: Path) -> None:
    assert alternative_names(made / "decode.crt") == {("DNS", "decode.pdserve.pdserve")}


def test_the_front_certificate_names_this_machine_and_the_given_hosts(tmp_path: Path) -> None:
    new_certs(tmp_path)
    make_certs(tmp_path, "pdserve", ["api.example.org", "10.1.2.3"])
    names = alternative_names(tmp_path / "front.crt")
    assert {("DNS", "localhost"), ("IP Address", "127.0.0.1"), ("DNS", "api.example.org")} < names
    assert ("IP Address", "10.1.2.3") in names


def test_keys_are_readable_by_their_owner_alone(made: Path) -> None:
    keys = list(made.glob("*.key"))
    assert len(keys) == len(NAMES) + 1
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o400}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_again_renews_the_certificates_under_the_same_ca(made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    new_certs(made)
    after = {path.name: path.read_bytes() for path in made.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] == after[name]} == {"ca.crt", "ca.key"}


@pytest.mark.parametrize("host", ["not a name\nbad=:", "", "münchen.example", "a..b", "x" * 64])
def test_what_is_no_host_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(CertsFailed, match="neither a DNS name nor an address"):
        make_certs(tmp_path / "tls", "pdserve", [host])
    assert not (tmp_path / "tls").exists()


def test_a_ca_without_its_key_or_with_anothers_is_told(made: Path, tmp_path: Path) -> None:
    other = new_certs(tmp_path / "other")
    (made / "ca.key").unlink()
    with pytest.raises(CertsFailed, match=r"ca\.crt and ca\.key in .*No such file"):
        make_certs(made, "pdserve")
    shutil.copy(other / "ca.key", made / "ca.key")
    with pytest.raises(CertsFailed, match=r"is not the key of ca\.crt"):
        make_certs(made, "pdserve")


@pytest.mark.parametrize("name", NAMES)
def test_strict_clients_accept_the_chain(made: Path, name: str) -> None:
    """As newer Pythons check by default: identifiers of keys, usages, the time."""
    host = "localhost" if name == "front" else f"{name}.pdserve.pdserve"
    client, server = ssl.create_default_context(cafile=str(made / "ca.crt")), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server.load_cert_chain(made / f"{name}.crt", made / f"{name}.key")
    assert shake_hands(client, server, host)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """In memory; raises what either side refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)
    return True
