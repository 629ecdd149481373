"""The gate before gloo's port where something is not as it should be: a rendezvous that stands still, no filters."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvtransfer.links import gate
from kvtransfer.links.gate import Gate
from tests.kvtransfer.links.link_tools import HOST


class StandingNotes:
    """A rendezvous whose answer to the first look takes until `go_on`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.is_asked = threading.Event()

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        self.go_on.wait()
        return False


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def test_a_rendezvous_that_stands_still_holds_up_no_link_and_ends_no_later_one(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: Any = StandingNotes()
    looked: list[object] = []
    monkeypatch.setattr(Gate, "_let_in", lambda self, origin: bool(looked.append(origin)))
    with pytest.raises(RuntimeError, match=r"not let in within 0\.05 s"), Gate(listener).letting_in(notes, 0, 0.05):
        assert notes.is_asked.wait(60)
    (thread,) = (each for each in threading.enumerate() if each.name == "link-gate")
    notes.go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert looked == [], "the port may be another link's by now"


def test_a_kernel_without_filters_is_told_of(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "silence", lambda each: False)
    with capture_logs() as logs:
        Gate(listener)
    assert [(log["event"], log["port"]) for log in logs] == [("link_gate_open", listener.getsockname()[1])]
