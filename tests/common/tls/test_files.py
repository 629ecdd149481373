"""Certificates that are replaced, half replaced and damaged while they are in use."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from common.tls.files import CertificateFiles, InvalidCertificate
from tests.certificates import new_certs


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    return new_certs(tmp_path / "tls")


def files_of(directory: Path, name: str = "router") -> CertificateFiles:
    return CertificateFiles(f"{directory}/{name}.crt", f"{directory}/{name}.key", f"{directory}/ca.crt")


def test_files_that_do_not_change_are_read_once(mounted: Path) -> None:
    files = files_of(mounted)
    first = files.current()
    assert first.certificate.startswith(b"-----BEGIN CERTIFICATE")
    assert files.current() is first


def test_replaced_files_are_read_again(mounted: Path) -> None:
    files = files_of(mounted)
    first = files.current()
    new_certs(mounted)
    second = files.current()
    assert second.certificate != first.certificate
    assert second.certificate == (mounted / "router.crt").read_bytes()
    assert second.ca == first.ca


def test_between_the_replacement_of_key_and_certificate_the_old_pair_is_used(mounted: Path, tmp_path: Path) -> None:
    files = files_of(mounted)
    first = files.current()
    fresh = new_certs(tmp_path / "fresh")
    os.replace(fresh / "router.key", mounted / "router.key")
    assert files.current() is first
    os.replace(fresh / "router.crt", mounted / "router.crt")
    assert files.current().certificate != first.certificate


@pytest.mark.parametrize("name", ["router.crt", "router.key", "ca.crt"])
def test_a_damaged_or_missing_file_leaves_the_last_certificate_in_use(mounted: Path, name: str) -> None:
    files = files_of(mounted)
    first = files.current()
    (mounted / name).unlink()
    assert files.current() is first
    (mounted / name).write_text("no certificate")
    assert files.current() is first


@pytest.mark.parametrize("name", ["router.crt", "router.key", "ca.crt"])
def test_files_that_were_never_usable_are_refused_by_name(mounted: Path, name: str) -> None:
    (mounted / name).unlink()
    with pytest.raises(InvalidCertificate, match=name):
        files_of(mounted).current()


def test_a_key_of_another_certificate_is_refused(mounted: Path) -> None:
    files = CertificateFiles(f"{mounted}/router.crt", f"{mounted}/decode.key", f"{mounted}/ca.crt")
    with pytest.raises(InvalidCertificate, match=r"router\.crt.*decode\.key"):
        files.current()


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(mounted: Path) -> None:
    key, locked = mounted / "router.key", mounted / "locked.key"
    loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(loaded.private_bytes(pem, pkcs8, encryption))
    locked.replace(key)
    with pytest.raises(InvalidCertificate, match=r"router\.key: the key has a passphrase"):
        files_of(mounted).current()
