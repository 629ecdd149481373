"""TLS towards clients, on both public ports: the certificate follows its files, connections that stand keep theirs."""

import ssl
from typing import Any

import grpc

from common.tls.files import CertificateFiles, InvalidCertificate
from common.tls.identity import server_credentials


def grpc_credentials(cert_file: str, key_file: str) -> grpc.ServerCredentials | None:
    """What the gRPC port serves with; None = no TLS. Raises InvalidCertificate."""
    return server_credentials(CertificateFiles(cert_file, key_file)) if cert_file else None


def http_context(cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """What the HTTP port serves with; None = no TLS. Raises InvalidCertificate."""
    if not cert_file:
        return None
    files = CertificateFiles(cert_file, key_file)
    used = files.current()
    current = _load(files)

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL at the start of each handshake, with or without a name."""
        nonlocal used, current
        now = files.current()
        if now is not used:
            try:
                used, current = now, _load(files)
            except InvalidCertificate:
                pass  # replaced again in this moment: the next handshake sees it
        connection.context = current

    context = _load(files)
    context.sni_callback = choose
    return context


def _load(files: CertificateFiles) -> ssl.SSLContext:
    """OpenSSL takes certificates from files only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert_file, files.key_file)
    except OSError as error:
        raise InvalidCertificate(f"{files.cert_file}, {files.key_file}: {error}") from error
    return context
