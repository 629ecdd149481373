"""One run of a local cluster: a name that all its processes carry, a directory, and a reaper."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.process.child import StartFailed, start_reaper
from deploy.process.reaper import SESSION_VARIABLE, remove_all, session_pids


@dataclass(frozen=True, slots=True)
class Session:
    """`runtime_dir` is ours alone (0700) and short, since Ray puts sockets below it."""

    name: str
    runtime_dir: Path


@contextlib.contextmanager
def session() -> Iterator[Session]:
    """Mark this process and all that it starts; at the end nothing of them is left.

    Also when this process is killed: the reaper, a process of its own, then does the same.
    """
    runtime_dir = Path(tempfile.mkdtemp(prefix="pdserve-", dir=_short_directory())).resolve()
    opened = Session(secrets.token_hex(8), runtime_dir)
    reaper = start_reaper(opened.name, opened.runtime_dir)
    os.environ[SESSION_VARIABLE] = opened.name
    try:
        yield opened
    finally:
        remove_all(opened.name, str(opened.runtime_dir))
        left = session_pids(opened.name, str(opened.runtime_dir))
        del os.environ[SESSION_VARIABLE]
        reaper.kill()
        reaper.wait()
        if left:
            raise StartFailed(f"processes of the cluster could not be ended: {left}")


def _short_directory() -> str | None:
    """A Unix socket's path has at most 107 characters, and Ray needs about 70 of them."""
    default = tempfile.gettempdir()
    return default if len(default) <= 20 else ("/tmp" if os.access("/tmp", os.W_OK) else None)
