"""A Ray of our own on this machine: loopback only, token checked, no dashboard, quiet, gone when we are.

Ray is lifecycle and placement; no token ever passes through it. `import ray` happens here and in `ray_pool.py`, late,
because what Ray does depends on environment variables that must be set first.
"""

import contextlib
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from common.values.messages import Role
from deploy.ray.driver import own_manners

# More than anybody scales to: on one machine it is memory that limits a pool, and Ray knows nothing of ours.
_WORKERS_PER_ROLE = 1024
_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum is 75 MiB; we put nothing in it

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TMPDIR_WARNING": "0",
    # Else Ray takes the machine's outer address for its own, and listens on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Workers share the GPUs of the machine: Ray must not hide them from actors that ask for none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray makes its workers nice (15); the worker is what the machine is there for.
    "RAY_worker_niceness": "0",
    "GLOG_minloglevel": "2",
    "grpc_proxy": "",  # else gRPC takes http_proxy's, which is for the world outside
}
_UNWANTED = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")


def resource_name(role: Role) -> str:
    """The Ray resource that a node offers when it may host workers of the role."""
    return f"pd_{role.value}"


def log_dir(runtime_dir: Path) -> Path:
    """Where the Ray below `runtime_dir` writes its logs."""
    return runtime_dir / "ray" / "session_latest" / "logs"


@contextlib.contextmanager
def local_ray(runtime_dir: Path) -> Iterator[None]:
    """Start Ray below `runtime_dir` and stop it at the end. Blocks for some seconds; call it in the main thread."""
    _prepare_environment(runtime_dir)
    import ray

    with own_manners():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            num_cpus=1,
            num_gpus=0,
            object_store_memory=_OBJECT_STORE_BYTES,
            resources={resource_name(role): _WORKERS_PER_ROLE for role in Role},
            # Ray starts workers through a shell and quotes everything but the interpreter.
            runtime_env={"py_executable": shlex.quote(sys.executable)},
            _temp_dir=str(runtime_dir / "ray"),
        )
    try:
        yield
    finally:
        ray.shutdown()


def _prepare_environment(runtime_dir: Path) -> None:
    """Settings that Ray reads when it is imported, and the token that all of its processes ask for."""
    token_path = runtime_dir / "ray_token"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32))
    for name in _UNWANTED:
        os.environ.pop(name, None)
    os.environ.update(_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(token_path))
