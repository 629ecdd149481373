"""How a command connects to a router: no proxy, and a CA or one certificate alone trusted. Standard library only."""

import os
import ssl
import urllib.request
from typing import Any

# As the setting tls.ca_file; commands that only talk to a router read no settings.
CA_VARIABLE = "PDSERVE_TLS_CA_FILE"


def ca_file() -> str | None:
    """The CA to believe; None = those that the machine believes."""
    return os.environ.get(CA_VARIABLE) or None


def open_directly(request: urllib.request.Request, timeout_s: float, cert_file: str = "") -> Any:
    """The reply, without a proxy of the environment: those are for the world outside. Raises OSError.

    The certificate to believe is read each time, since it may have been replaced. `cert_file`: the only one.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if request.type == "https":
        context = trusting_only(cert_file) if cert_file else trusting_ca()
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)


def trusting_ca() -> ssl.SSLContext:
    """Checks the router's certificate and name. Raises OSError when the CA cannot be read."""
    return ssl.create_default_context(cafile=ca_file())


def trusting_only(cert_file: str) -> ssl.SSLContext:
    """Believes one certificate, whatever its names: for the router that this machine itself has started."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
