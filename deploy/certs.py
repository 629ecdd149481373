"""`pdserve certs`: a CA of one's own and a certificate per component, for development and small installations.

Run again, it renews the certificates under the same CA: running processes take them at their next connection. Needs
the openssl command; where certificates come from elsewhere (cert-manager, Vault), their names are what counts.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import PdserveError
from common.tls.identity import Component, certificate_name

FRONT = "front"  # what clients of the public ports see
CA_DAYS, DAYS = 3650, 365
_LOCAL_NAMES = ("DNS:localhost", "IP:127.0.0.1", "IP:::1")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class CertsFailed(PdserveError):
    """openssl is missing or refused; the message says which."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One certificate: its file name and its alternative names, in openssl's words."""

    name: str
    alternative_names: tuple[str, ...]


def make_certs(directory: Path, namespace: str, hosts: Sequence[str] = (), days: int = DAYS) -> list[Path]:
    """Write ca.crt, and NAME.crt with NAME.key for each component and the front; returns the certificates.

    `hosts`: names or addresses by which clients reach the routers, besides localhost.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (directory / "ca.crt").exists():
        _make_ca(directory)
    wanted = [_Wanted(part, (f"DNS:{certificate_name(part, namespace)}",)) for part in Component]
    wanted.append(_Wanted(FRONT, (*_LOCAL_NAMES, *map(_alternative_name, hosts))))
    return [directory / "ca.crt", *(_make(directory, one, days) for one in wanted)]


def _make_ca(directory: Path) -> None:
    extensions = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    key, cert = _draft(directory, "ca.key"), _draft(directory, "ca.crt")
    subject = ("-subj", "/CN=pdserve CA", "-days", str(CA_DAYS))
    _openssl("req", "-x509", *_KEY, "-keyout", str(key), "-out", str(cert), *subject, *extensions)
    _publish(key, directory / "ca.key")
    _publish(cert, directory / "ca.crt")


def _make(directory: Path, wanted: _Wanted, days: int) -> Path:
    key, cert, request = (_draft(directory, f"{wanted.name}.{kind}") for kind in ("key", "crt", "csr"))
    extensions = _draft(directory, f"{wanted.name}.ext")
    extensions.write_text(
        f"subjectAltName={','.join(wanted.alternative_names)}\n"
        "extendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\n"
    )
    _openssl("req", "-new", *_KEY, "-keyout", str(key), "-out", str(request), "-subj", f"/CN=pdserve {wanted.name}")
    signer = ("-CA", str(directory / "ca.crt"), "-CAkey", str(directory / "ca.key"))
    serial = ("-set_serial", f"0x{secrets.token_hex(16)}", "-days", str(days), "-extfile", str(extensions))
    _openssl("x509", "-req", "-in", str(request), "-out", str(cert), *signer, *serial)
    _publish(key, directory / f"{wanted.name}.key")
    _publish(cert, directory / f"{wanted.name}.crt")
    request.unlink()
    extensions.unlink()
    return directory / f"{wanted.name}.crt"


def _alternative_name(host: str) -> str:
    kind = "IP" if ":" in host or host.replace(".", "").isdigit() else "DNS"
    return f"{kind}:{host}"


def _draft(directory: Path, name: str) -> Path:
    return directory / f".{name}.new"


def _publish(draft: Path, path: Path) -> None:
    """At once, and readable by its owner alone if it is a key."""
    draft.chmod(0o400 if path.suffix == ".key" else 0o444)
    os.replace(draft, path)


def _openssl(*arguments: str) -> None:
    binary = shutil.which("openssl")
    if binary is None:
        raise CertsFailed("the openssl command is not installed (Debian: apt-get install openssl)")
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CertsFailed(f"openssl {arguments[0]}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
