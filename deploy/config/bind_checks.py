"""Refuses to listen where others can connect without TLS, unless somebody says that the network is to be trusted, and
to start with certificates that cannot be used.
"""

import ipaddress

from common.tls.files import CertificateFiles
from common.values.addresses import is_wildcard
from common.values.config import ClusterConfig, TlsSettings
from deploy.config.variables import InvalidSettings


def check_router(config: ClusterConfig) -> None:
    """Raise InvalidSettings when clients elsewhere would talk to the router in the clear, or InvalidCertificate."""
    _check_certificates(config.tls.paths_of("router"))
    _check_certificates((config.router.cert_file, config.router.key_file, ""))
    if not config.router.cert_file:
        _check("router.host", config.router.host, "router.cert_file and router.key_file", insecure=config.insecure)


def check_worker(config: ClusterConfig, role: str) -> None:
    """Raise InvalidSettings when anybody elsewhere could call the worker, or InvalidCertificate."""
    _check_certificates(config.tls.paths_of(role))
    settings = config.prefill_worker if role == "prefill" else config.decode_worker
    if is_wildcard(settings.host):
        raise InvalidSettings(
            f"{role}_worker.host is {settings.host}: others get this address and cannot connect to it. Give the "
            "address of this machine that routers and workers reach"
        )
    check_worker_host(settings.host, config.tls, insecure=config.insecure, name=f"{role}_worker.host")


def check_worker_host(host: str, tls: TlsSettings, *, insecure: bool, name: str = "the worker's address") -> None:
    if not tls.is_on:
        _check(name, host, "tls.cert_file, tls.key_file and tls.ca_file", insecure=insecure)


def is_loopback(host: str) -> bool:
    """True when it is not reached from outside of this machine. A name may resolve to anything, but for localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificates(paths: tuple[str, str, str]) -> None:
    if paths[0]:
        CertificateFiles(*paths).current()


def _check(name: str, host: str, settings: str, *, insecure: bool) -> None:
    if insecure or is_loopback(host):
        return
    raise InvalidSettings(
        f"{name} is {host}: others can connect, and nothing is encrypted or authenticated. Give certificates "
        f"(--tls DIR, or {settings}), or --insecure if every machine that reaches this address is trusted"
    )
