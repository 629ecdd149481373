"""Child processes of ours: started so that they die with us, their output in a file, ended in bounded time."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.values.errors import PdserveError
from deploy.process.reaper import SESSION_VARIABLE

_HERE = Path(__file__).parent
_LAUNCHER = _HERE / "die_with_parent.py"
_REAPER = _HERE / "reaper.py"
_TAIL_BYTES = 4000


# Settings have been read by now; children get what they need of them in a file or on standard input.
_SECRETS = ("PDSERVE_ROUTER_ADMIN_KEY", "PDSERVE_REDIS_URL")


def hide_secrets() -> None:
    """Take secrets out of our environment, which every child inherits and Ray hands on to its own."""
    for name in _SECRETS:
        os.environ.pop(name, None)


_NEEDED_ANYWHERE = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", SESSION_VARIABLE)


class StartFailed(PdserveError):
    """Something that the cluster needs would not start; the message says what and why, for an operator."""


class Child:
    """One running child. Owns the process: `stop` it."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative = the signal that ended it."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines that the child wrote."""
        try:
            text = self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])

    def terminate(self) -> None:
        """Ask it to end; returns at once."""
        if not self.has_ended:
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Ask it to end, wait for `grace_s`, then kill it. Returns when it is gone."""
        self.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program that is not ours: what finds its files, and a locale that every machine has.

    Valkey does not start with one that is missing, and what else a user's environment does to it is unknown.
    """
    return {**{name: environ[name] for name in _NEEDED_ANYWHERE if name in environ}, "LC_ALL": "C"}


def start_child(
    name: str,
    command: Sequence[str],
    log_path: Path,
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Child:
    """Start `command` so that the kernel kills it when we die. Call it from a thread that lives as long as we do.

    `stdin` is for what must not be seen in the process list (passwords).
    """
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    if stdin is not None and process.stdin is not None:
        with process.stdin as pipe:
            pipe.write(stdin)
    return Child(name, process, log_path)


def start_reaper(session: str, runtime_dir: Path) -> "subprocess.Popen[bytes]":
    """Start the process that cleans up if this one is killed. It ends by itself after us; kill it when all is clean."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER), str(os.getpid()), session, str(runtime_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
