"""Certificates and keys as mounted files: read as a whole, and again when one of them has changed."""

import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from common.telemetry.logs import get_logger
from common.values.errors import PeerError

# (size, time of change, inode): a Kubernetes secret is replaced by renaming a link, which changes the inode.
_Stamp = tuple[tuple[int, int, int], ...]


class InvalidCertificate(PeerError):
    """A certificate, key or CA cannot be used; the message names the files. A connection that needs it fails."""


@dataclass(frozen=True, slots=True)
class Pems:
    """What was in the files at one time. `ca` is empty when no CA file was named."""

    certificate: bytes
    key: bytes
    ca: bytes


class CertificateFiles:
    """One certificate with its key and, for mutual TLS, the CA that signs the others. Safe in any thread."""

    def __init__(self, cert_file: str, key_file: str, ca_file: str = "") -> None:
        self.cert_file = cert_file
        self.key_file = key_file
        self.ca_file = ca_file
        self._lock = threading.Lock()
        self._read_last: tuple[_Stamp, Pems] | None = None

    def current(self) -> Pems:
        """What is mounted now, or what was read last while the files are being replaced or damaged.

        Raises InvalidCertificate when they were never usable.
        """
        with self._lock:
            try:
                return self._current()
            except InvalidCertificate as error:
                if self._read_last is None:
                    raise
                get_logger().warning("certificate_not_replaced", reason=str(error))
                return self._read_last[1]

    def _current(self) -> Pems:
        stamp = self._stamp()
        if self._read_last is None or self._read_last[0] != stamp:
            self._check()
            self._read_last = stamp, Pems(*map(_read, (self.cert_file, self.key_file, self.ca_file)))
        return self._read_last[1]

    def _stamp(self) -> _Stamp:
        try:
            stats = [os.stat(path) for path in (self.cert_file, self.key_file, self.ca_file) if path]
        except OSError as error:
            raise InvalidCertificate(f"{error.filename}: {error.strerror}") from error
        return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def _check(self) -> None:
        """OpenSSL says whether key and certificate are a pair: between the two renames they are not."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert_file, self.key_file, self._refuse_passphrase)
            if self.ca_file:
                context.load_verify_locations(self.ca_file)
        except OSError as error:  # SSLError is one
            names = ", ".join(path for path in (self.cert_file, self.key_file, self.ca_file) if path)
            raise InvalidCertificate(f"{names}: {error}") from error

    def _refuse_passphrase(self) -> str:
        """OpenSSL would ask for it at the terminal."""
        raise InvalidCertificate(f"{self.key_file}: the key has a passphrase, and there is no terminal to type it on")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise InvalidCertificate(f"{path}: {error.strerror}") from error
