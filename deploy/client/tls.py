"""Whom a command believes to be the router: whoever the CA signed, or one certificate alone. Standard library only."""

import os
import ssl

# As the setting tls.ca_file; commands that only talk to a router read no settings.
CA_VARIABLE = "PDSERVE_TLS_CA_FILE"


def ca_file() -> str | None:
    """The CA to believe; None = those that the machine believes."""
    return os.environ.get(CA_VARIABLE) or None


def trusting_ca() -> ssl.SSLContext:
    """Checks the router's certificate and name. Raises OSError when the CA cannot be read."""
    return ssl.create_default_context(cafile=ca_file())


def trusting_only(cert_file: str) -> ssl.SSLContext:
    """Believes one certificate, whatever its names: for the router that this machine itself has started."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
