"""`pdserve certs`: what it writes, and that it can be run again."""

import ssl
import stat
from pathlib import Path

import pytest

from common.tls.files import CertificateFiles
from common.tls.identity import Component
from deploy import certs
from deploy.certs import CertsFailed, make_certs
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


def test_without_openssl_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs.shutil, "which", lambda name: None)
    with pytest.raises(CertsFailed, match="openssl command is not installed"):
        make_certs(tmp_path, "pdserve")


def test_what_openssl_refuses_is_told(tmp_path: Path) -> None:
    new_certs(tmp_path)
    with pytest.raises(CertsFailed, match="openssl x509"):
        make_certs(tmp_path, "pdserve", ["not a name\nbad=:"])
