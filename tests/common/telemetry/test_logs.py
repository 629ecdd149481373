"""The log never fails the work that it is about, and says what it lost."""

import errno
import io
import json
import subprocess
import sys

from common.telemetry.logs import LossyStream


class Disk(io.StringIO):
    """A stream on a disk that may be full."""

    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_line_that_cannot_be_written_is_lost_and_nothing_fails() -> None:
    disk = Disk()
    stream = LossyStream(disk)
    disk.is_full = True
    print("one", file=stream, flush=True)  # type: ignore[arg-type]
    assert disk.getvalue() == ""


def test_a_line_and_its_end_are_written_at_once() -> None:
    disk = Disk()
    print("one", file=LossyStream(disk), flush=True)  # type: ignore[arg-type]
    assert disk.written == ["one\n"]


def test_lines_lost_as_print_writes_them_are_counted_once() -> None:
    disk = Disk()
    stream = LossyStream(disk)
    disk.is_full = True
    print("one", file=stream, flush=True)  # type: ignore[arg-type]
    disk.is_full = False
    print("two", file=stream, flush=True)  # type: ignore[arg-type]
    lost, two = disk.getvalue().splitlines()
    assert (json.loads(lost)["num_lost"], two) == (1, "two")


def test_how_much_was_lost_is_said_once_there_is_room_again() -> None:
    disk = Disk()
    stream = LossyStream(disk)
    stream.write("zero\n")
    disk.is_full = True
    stream.write("one\n")
    stream.write("two\n")
    disk.is_full = False
    stream.write("three\n")
    stream.write("four\n")
    zero, lost, *rest = disk.getvalue().splitlines()
    assert (zero, rest) == ("zero", ["three", "four"])
    assert json.loads(lost) == {"event": "log_lines_lost", "level": "warning", "num_lost": 2}


def test_every_line_says_whose_it_is_from_every_thread() -> None:
    """In a process of its own: the set-up is for all of a process."""
    code = """
from threading import Thread
from common.telemetry.logs import configure_logs, get_logger
configure_logs("r1", "INFO")
get_logger().info("in_main", count=1, reason=ValueError("no JSON"), text="\\u20ac\\ud800")
get_logger().debug("too_fine")
thread = Thread(target=lambda: get_logger().warning("in_thread"))
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=True)
    first, second = map(json.loads, done.stderr.splitlines())
    assert first.pop("timestamp") <= second.pop("timestamp")
    assert first == {
        **{"event": "in_main", "level": "info", "process": "r1"},
        **{"count": 1, "reason": "no JSON", "text": "\u20ac\ud800"},
    }
    assert second == {"event": "in_thread", "level": "warning", "process": "r1"}
