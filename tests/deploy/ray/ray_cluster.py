"""A Ray cluster of somebody else, for a test: `ray start` on loopback, ended process by process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.ports import free_port

START_LIMIT_S = 120.0
_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


class RayCluster:
    """A head with room for workers. `env` is what a driver needs to be let in."""

    def __init__(self, directory: Path) -> None:
        token = directory / "token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PDSERVE_"))}
        self.env |= {**_ENV, "RAY_AUTH_TOKEN_PATH": str(token)}
        self._log = directory / "ray.log"
        self._directory = directory
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _command(self) -> list[str]:
        port = self.address.rpartition(":")[2]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *("--port", port, "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"),
            *("--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", str(80 << 20)),
            *("--resources", '{"pd_prefill": 3, "pd_decode": 3}'),
            *("--temp-dir", str(self._directory / "ray")),
        ]

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the head and everything below it or of its directory: raylets start sessions of their own."""
        below = psutil.Process(self._process.pid).children(recursive=True) if not self.has_ended() else []
        for process in (*below, *_naming(str(self._directory))):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()


def _naming(directory: str) -> list[psutil.Process]:
    """Processes that have the directory, which is this test's alone, in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(directory in text for text in process.cmdline()):
                found.append(process)
    return found


@contextlib.contextmanager
def ray_cluster(directory: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()
