"""Who this process is towards the other components, and how it calls and answers them.

A component's name is the DNS name `<role>.<namespace>.pdserve` in its certificate: a server finds its caller's role
there (`admission.py`), a client insists on the role that it means to call, whatever the address. So a worker that is
listed under somebody else's address is not talked to, and clusters under one CA stay apart.
"""

from enum import StrEnum
from typing import Any

import grpc

from common.tls.files import CertificateFiles, Pems
from common.values.config import TlsSettings
from common.values.errors import PdserveError
from common.wire.grpc_options import Options, channel_options

_DOMAIN = "pdserve"


class Component(StrEnum):
    """Roles that a certificate can name. An operator reads books (`pdserve audit`) and does nothing else."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"


def certificate_name(component: str, namespace: str) -> str:
    """The DNS name that makes its holder a component of the cluster."""
    return f"{component}.{namespace}.{_DOMAIN}"


class Identity:
    """One component of one cluster. Without certificates everybody is believed."""

    def __init__(self, component: str, namespace: str, tls: TlsSettings | None = None) -> None:
        self.component = component
        self.namespace = namespace
        self._files = CertificateFiles(*tls.paths_of(component)) if tls is not None and tls.is_on else None

    @property
    def has_certificate(self) -> bool:
        return self._files is not None

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen for other components; returns the port. Raises InvalidCertificate, or PdserveError: taken."""
        credentials = None if self._files is None else server_credentials(self._files)
        try:
            if credentials is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise PdserveError(f"cannot listen on {address}; choose another port") from error

    def channel(self, address: str, component: str, options: Options | None = None) -> grpc.aio.Channel:
        """A channel to a component, with the certificate that is mounted now. Raises InvalidCertificate."""
        options = channel_options() if options is None else options
        if self._files is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, _credentials(self._files), options=self._named(component, options))

    def blocking_channel(self, address: str, component: str) -> grpc.Channel:
        """As `channel`, outside of an event loop."""
        options = channel_options()
        if self._files is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, _credentials(self._files), options=self._named(component, options))

    def _named(self, component: str, options: Options) -> Any:
        return [*options, ("grpc.ssl_target_name_override", certificate_name(component, self.namespace))]


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files: each new connection gets the certificate that is mounted then.

    With a CA, callers must have a certificate of it.
    """
    used = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        now = files.current()
        if now is used:
            return None
        used = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, bool(files.ca_file))


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca or None)


def _credentials(files: CertificateFiles) -> grpc.ChannelCredentials:
    pems = files.current()
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)
