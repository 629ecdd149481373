"""Run a command that the kernel kills when its parent dies: `python -I -S die_with_parent.py PARENT_PID COMMAND...`.

A program of its own because the setting must be made between fork and exec, and forking a process with threads to
run Python in between is not safe. Imports as little as it can: it runs before every child of ours.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when `parent_pid` does; at once if it is gone already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
