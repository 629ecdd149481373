"""Certificates for tests: made once per process, by the command that makes them for people."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.values.config import TlsSettings
from deploy.cli.certs import make_certs
from deploy.client.tls import CA_VARIABLE

NAMESPACE = "pdserve"


def new_certs(directory: Path, namespace: str = NAMESPACE, *, days: float = 30) -> Path:
    """A CA and certificates in a directory of their own."""
    make_certs(directory, namespace, days=days)
    return directory


def tls_settings(directory: Path) -> TlsSettings:
    """What `--tls DIRECTORY` sets."""
    return TlsSettings(
        cert_file=f"{directory}/{{role}}.crt", key_file=f"{directory}/{{role}}.key", ca_file=f"{directory}/ca.crt"
    )


@contextmanager
def trusting(directory: Path) -> Iterator[None]:
    """Clients in this process, and commands that it starts, believe the CA."""
    with pytest.MonkeyPatch.context() as environment:
        for name in (CA_VARIABLE, "SSL_CERT_FILE"):
            environment.setenv(name, f"{directory}/ca.crt")
        yield
