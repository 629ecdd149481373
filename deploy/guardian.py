"""Leaves nothing behind: ends every process of a session when the process that owns the session has died.

    python -I -S guardian.py OWNER_PID SESSION RUNTIME_DIR

All processes of a session carry PDSERVE_SESSION in their environment, from the owner down to what Ray starts. The
kernel takes the owner's own children with it (`die_with_parent.py`); this program takes the rest (Ray's agents live
on for a minute) and removes the session's directory. Needs /proc; standard library only.
"""

import os
import select
import shutil
import signal
import sys
import time

SESSION_VARIABLE = "PDSERVE_SESSION"
_QUIET_ROUNDS = 3
_ROUND_S = 0.1


def session_pids(session: str) -> list[int]:
    """Processes of this user, other than the caller, that belong to the session. Zombies are gone already."""
    marker = f"{SESSION_VARIABLE}={session}".encode()
    others = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    return [pid for pid in others if marker in _environment(pid) and _is_running(pid)]


def end_session(session: str, keep: frozenset[int] = frozenset(), limit_s: float = 10.0) -> list[int]:
    """Kill what is left of the session except `keep`, until nothing is for some rounds; returns what was killed."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _QUIET_ROUNDS and time.monotonic() < deadline_s:
        left = [pid for pid in session_pids(session) if pid not in keep]
        for pid in left:
            _kill(pid)
        killed.update(left)
        num_quiet = 0 if left else num_quiet + 1
        time.sleep(_ROUND_S)
    return sorted(killed)


def wait_for_exit(pid: int) -> None:
    """Return when the process has ended; at once if there is none."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main(owner_pid: int, session: str, runtime_dir: str) -> None:
    """Wait for the owner, then clean up after it. A Ctrl-C in the terminal is the owner's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_exit(owner_pid)
    end_session(session, keep=frozenset({os.getpid()}))
    shutil.rmtree(runtime_dir, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
