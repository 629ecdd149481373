"""Which error ends a command with which exit code. Bugs are not explained: they keep their traceback."""

import sys

_FAILED, _USAGE, _UNHEALTHY = 1, 2, 3

# By name, so that no command pays for the imports of another: an error's class is loaded when it is raised.
_CODES = {
    ("deploy.config.variables", "InvalidSettings"): _USAGE,
    ("deploy.client.admin", "Unhealthy"): _UNHEALTHY,
    ("deploy.client.admin", "AdminFailed"): _FAILED,
    ("deploy.cli.generate", "GenerateFailed"): _FAILED,
    ("deploy.load.bench", "BenchFailed"): _FAILED,
    ("deploy.load.traces", "InvalidTrace"): _USAGE,
    ("router.front.ports", "PortInUse"): _FAILED,
    ("router.tenants.key_file", "InvalidKeyFile"): _USAGE,
    ("common.checkpoint.spec", "CheckpointError"): _FAILED,
    ("deploy.client.addresses", "InvalidAddress"): _USAGE,
    ("common.values.errors", "PdserveError"): _FAILED,
}


def explain(error: Exception) -> tuple[str, int] | None:
    """(message, exit code) of an error that we expect; None for anything else."""
    for (module, name), code in _CODES.items():
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(error, getattr(loaded, name)):
            return str(error), code
    return None
