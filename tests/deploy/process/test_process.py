"""Children die with their parent, and a session's leftovers with its owner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.process.child import start_child
from deploy.process.reaper import SESSION_VARIABLE, end_session, session_pids, wait_for_exit
from deploy.process.session import session
from tests.paths import ROOT

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(90)"]
LIMIT_S = 60.0

# An owner with a child that dies with it, and a grandchild that left its group and would live on.
OWNER = f"""
import subprocess, sys, time
from pathlib import Path
from deploy.process.child import start_child
from deploy.process.session import session
with session() as opened:
    child = start_child("child", {SLEEP!r}, opened.runtime_dir / "log")
    stray = subprocess.Popen({SLEEP!r}, start_new_session=True)
    print(opened.name, opened.runtime_dir, child.pid, stray.pid, flush=True)
    time.sleep(90)
"""


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A zombie has ended: who should reap it does not matter here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, and while it was read
        return False


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from deploy.process.child import start_child
import time
print(start_child("child", {SLEEP!r}, Path({str(tmp_path / "log")!r})).pid, flush=True)
time.sleep(90)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert is_running(child_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_running(child_pid))


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    launcher = ROOT / "deploy" / "process" / "die_with_parent.py"
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(launcher), "1", "echo", "started"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_guardian_ends_everything_of_a_session_whose_owner_is_killed(number: signal.Signals) -> None:
    """1. the owner is killed; 2. its child, its stray grandchild, its directory and the reaper itself are gone."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, directory, child_pid, stray_pid = owner.stdout.readline().split()
    assert is_running(int(child_pid))
    assert is_running(int(stray_pid))
    # Not at once: for a moment of its exec a process has no environment to be known by.
    until(lambda: set(session_pids(name, directory)) == {int(child_pid), int(stray_pid)})
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    until(lambda: not is_running(int(stray_pid)) and not is_running(int(child_pid)))
    until(lambda: not Path(directory).exists())
    until(lambda: not any(name in command_line(pid) for pid in all_pids()))


def test_a_session_that_ends_normally_leaves_nothing() -> None:
    with session() as opened:
        stray = subprocess.Popen(SLEEP, start_new_session=True)
        assert opened.runtime_dir.stat().st_mode & 0o077 == 0
    assert stray.wait(LIMIT_S) == -signal.SIGKILL
    assert not opened.runtime_dir.exists()
    assert SESSION_VARIABLE not in os.environ


def test_a_process_that_lost_its_mark_is_known_by_the_log_it_writes_and_a_reader_is_spared(tmp_path: Path) -> None:
    """As Ray's agents do, which write their title over their environment."""
    log = tmp_path / "agent.log"
    with log.open("w") as file:
        writer = subprocess.Popen(SLEEP, stdout=file)
    with log.open() as file:
        reader = subprocess.Popen(SLEEP, stdin=file)
    log.unlink()
    assert end_session("nobody", str(tmp_path)) == [writer.pid]
    assert reader.poll() is None
    reader.kill()
    reader.wait()
    writer.wait()


def test_ending_a_session_spares_other_sessions() -> None:
    # Names of this run alone: another run of this test on the machine has sessions, too.
    names = (f"test-mine-{os.getpid()}", f"test-other-{os.getpid()}")
    mine, other = [subprocess.Popen(SLEEP, env={**os.environ, SESSION_VARIABLE: name}) for name in names]
    assert end_session(names[0], "/nonexistent") == [mine.pid]
    assert other.poll() is None
    assert end_session(names[1], "/nonexistent") == [other.pid]
    mine.wait()
    other.wait()


def test_stopping_a_child_that_ignores_the_request_takes_no_longer_than_the_grace(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(90)"
    child = start_child("stubborn", [sys.executable, "-c", code], tmp_path / "log")
    until(lambda: "up" in child.log_tail())
    child.stop(grace_s=0.1)
    assert child.exit_code == -signal.SIGKILL


def test_the_last_lines_of_a_childs_output_can_be_had(tmp_path: Path) -> None:
    child = start_child("talker", [sys.executable, "-c", "print('\\n'.join(map(str, range(100))))"], tmp_path / "log")
    until(lambda: child.has_ended)
    assert child.log_tail(3) == "97\n98\n99"
    assert child.exit_code == 0


def test_standard_input_reaches_the_child(tmp_path: Path) -> None:
    child = start_child("reader", ["cat"], tmp_path / "log", stdin=b"secret")
    until(lambda: child.has_ended)
    assert child.log_tail() == "secret"


def test_waiting_for_a_process_that_is_gone_returns_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    wait_for_exit(process.pid)


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
