"""`pdserve certs`: a CA of one's own and a certificate per component, for development and small installations.

Run again, it renews the certificates under the same CA: running processes take them at their next connection. Where
certificates come from elsewhere (cert-manager, Vault), their names are what counts.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.tls.identity import Component, certificate_name
from common.values.errors import PdserveError

FRONT = "front"  # what clients of the public ports see
CA_DAYS, DAYS = 3650, 365
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\*\.)?([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")
_BACKDATED = timedelta(days=1)  # clocks of machines differ
_KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_SIGNS_HANDSHAKES, _SIGNS_CERTIFICATES = ("digital_signature",), ("key_cert_sign", "crl_sign")
_Extensions = list[tuple[x509.ExtensionType, bool]]  # with whether it is critical


class CertsFailed(PdserveError):
    """A host cannot stand in a certificate, or the CA that is there cannot sign; the message says which."""


@dataclass(frozen=True, slots=True)
class _Issuer:
    name: x509.Name
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def make_certs(directory: Path, namespace: str, hosts: Sequence[str] = (), days: float = DAYS) -> list[Path]:
    """Write ca.crt, and NAME.crt with NAME.key for each component and the front; returns the certificates.

    `hosts`: names or addresses by which clients reach the routers, besides localhost.
    """
    wanted: dict[str, list[x509.GeneralName]] = {
        str(part): [x509.DNSName(certificate_name(part, namespace))] for part in Component
    }
    wanted[FRONT] = [_alternative_name(host) for host in (*_LOCAL_NAMES, *hosts)]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (directory / "ca.crt").exists():
        _issue(directory, "ca", "pdserve CA", CA_DAYS, _ca_extensions(), None)
    issuer = _read_ca(directory)
    for name, alternative_names in wanted.items():
        _issue(directory, name, f"pdserve {name}", days, _extensions(alternative_names, issuer), issuer)
    return [directory / f"{name}.crt" for name in ("ca", *wanted)]


def _issue(
    directory: Path, name: str, common_name: str, days: float, extensions: _Extensions, issuer: _Issuer | None
) -> None:
    """A certificate with a key of its own; without an issuer it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    issuer = issuer or _Issuer(subject, key)
    now = datetime.now(UTC)
    draft = x509.CertificateBuilder(issuer.name, subject, key.public_key(), x509.random_serial_number())
    draft = draft.not_valid_before(now - _BACKDATED).not_valid_after(now + timedelta(days=days))
    for extension, is_critical in (*extensions, (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)):
        draft = draft.add_extension(extension, is_critical)
    certificate = draft.sign(issuer.key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _publish(directory / f"{name}.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o400)
    _publish(directory / f"{name}.crt", certificate.public_bytes(pem), 0o444)


def _ca_extensions() -> _Extensions:
    return [(x509.BasicConstraints(ca=True, path_length=None), True), (_key_usage(_SIGNS_CERTIFICATES), True)]


def _extensions(alternative_names: Sequence[x509.GeneralName], issuer: _Issuer) -> _Extensions:
    return [
        (x509.SubjectAlternativeName(alternative_names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (x509.BasicConstraints(ca=False, path_length=None), False),
        (_key_usage(_SIGNS_HANDSHAKES), True),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), False),
    ]


def _key_usage(granted: Sequence[str]) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in granted for usage in _KEY_USAGES})


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise CertsFailed(f"{host!r} is neither a DNS name nor an address") from None
        return x509.DNSName(host)


def _read_ca(directory: Path) -> _Issuer:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise CertsFailed(f"ca.crt and ca.key in {directory}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise CertsFailed(f"{directory}/ca.key: expected an EC or an RSA key")
    if key.public_key() != certificate.public_key():
        raise CertsFailed(f"{directory}/ca.key is not the key of ca.crt")
    return _Issuer(certificate.subject, key)


def _publish(path: Path, content: bytes, mode: int) -> None:
    """At once, so that a reader sees all of the old or all of the new; it is readable only once it has `mode`."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o600), "wb") as file:
        file.write(content)
    draft.chmod(mode)
    os.replace(draft, path)
