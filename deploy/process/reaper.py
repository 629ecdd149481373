"""Leaves nothing behind: ends every process of a session when the process that owns the session has died.

    python -I -S reaper.py OWNER_PID SESSION RUNTIME_DIR

A process belongs to a session when PDSERVE_SESSION says so in its environment, or when it writes to a file in the
session's directory: Ray's agents overwrite their environment with their title, but not their logs. The kernel takes
the owner's own children with it (`die_with_parent.py`); this program takes the rest (those agents live on for a
minute) and removes the directory. Needs /proc; standard library only.
"""

import os
import select
import shutil
import signal
import stat
import sys
import time

SESSION_VARIABLE = "PDSERVE_SESSION"
_QUIET_ROUNDS = 3
_ROUND_S = 0.1
_MAX_REMOVALS = 10


def session_pids(session: str, runtime_dir: str) -> list[int]:
    """Processes of this user, other than the caller, that belong to the session. Zombies are gone already."""
    others = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    return [pid for pid in others if _is_running(pid) and (_is_marked(pid, session) or _writes_below(pid, runtime_dir))]


def end_session(session: str, runtime_dir: str, limit_s: float = 10.0) -> list[int]:
    """Kill what is left of the session, until nothing is for some rounds; returns what was killed."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _QUIET_ROUNDS and time.monotonic() < deadline_s:
        left = session_pids(session, runtime_dir)
        for pid in left:
            _kill(pid)
        killed.update(left)
        num_quiet = 0 if left else num_quiet + 1
        time.sleep(_ROUND_S)
    return sorted(killed)


def remove_all(session: str, runtime_dir: str) -> None:
    """End what is left of the session, and remove its directory: again while somebody still wrote into it."""
    for _ in range(_MAX_REMOVALS):
        end_session(session, runtime_dir)
        shutil.rmtree(runtime_dir, ignore_errors=True)
        if not os.path.exists(runtime_dir):
            return


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


def _is_marked(pid: int, session: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{SESSION_VARIABLE}={session}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def _writes_below(pid: int, directory: str) -> bool:
    """Only writers: somebody who reads a log there is none of ours."""
    try:
        handles = [handle.path for handle in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(_is_written_below(handle, directory) for handle in handles)


def _is_written_below(handle: str, directory: str) -> bool:
    try:
        is_writer = os.lstat(handle).st_mode & stat.S_IWUSR != 0
        return is_writer and os.readlink(handle).startswith(f"{directory}/")
    except OSError:  # closed meanwhile
        return False


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
    remove_all(session, runtime_dir)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
