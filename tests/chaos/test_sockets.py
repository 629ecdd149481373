"""Our hold on other processes' connections does what it says: each fault is felt by its owner."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos import sockets

pytestmark = pytest.mark.skipif(not sockets.is_possible(), reason="this machine does not lend descriptors")

# Connects, tells its port, then echoes each message until the connection ends; says how that was.
ECHO = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
try:
    while data := connection.recv(100):
        connection.sendall(data)
    print("ended", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def echoing() -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", ECHO, str(server.getsockname()[1])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            ours, _ = server.accept()
            with ours:
                assert child.stdout is not None and child.stdout.readline() == "up\n"
                ours.settimeout(30)
                yield child, ours
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _theirs(child: subprocess.Popen[str], ours: socket.socket) -> sockets.Connection:
    ((fd, local, remote),) = sockets.open_ports(child.pid)
    assert remote == ours.getsockname()[1]
    end = sockets.borrow(child.pid, fd, local, remote)
    assert end is not None
    return end


def test_what_a_black_hole_swallows_arrives_when_it_is_lifted() -> None:
    with echoing() as (child, ours):
        end = _theirs(child, ours)
        with sockets.black_hole([end]):
            ours.sendall(b"hello")
            ours.settimeout(0.5)
            with pytest.raises(TimeoutError):
                ours.recv(10)
        ours.settimeout(30)
        assert ours.recv(10) == b"hello"
        info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        assert int.from_bytes(info[100:104], sys.byteorder) > 0, "nothing had to be sent again"
        end.socket.close()


def test_a_reset_ends_the_connection_for_both() -> None:
    with echoing() as (child, ours):
        end = _theirs(child, ours)
        assert sockets.reset([end]) == 1
        with pytest.raises(ConnectionResetError):
            ours.recv(10)
        assert child.stdout is not None
        assert child.stdout.readline().strip() in ("ended", "ConnectionResetError", "BrokenPipeError", "OSError")
        end.socket.close()


def test_a_pace_is_set_and_taken_back() -> None:
    with echoing() as (child, ours):
        end = _theirs(child, ours)
        with sockets.paced([end], 123_456):
            assert end.pacing_rate == 123_456
        assert end.pacing_rate != 123_456
        end.socket.close()


def test_a_descriptor_that_became_another_is_not_touched() -> None:
    with echoing() as (child, _):
        ((fd, local, remote),) = sockets.open_ports(child.pid)
        assert sockets.borrow(child.pid, fd, local, remote + 1) is None
        assert sockets.borrow(child.pid, 999, local, remote) is None


def test_connections_between_two_processes_are_found_at_both_ends() -> None:
    with echoing() as (child, ours):
        port = ours.getsockname()[1]
        with sockets.connections_between(child.pid, os.getpid(), {port}) as ends:
            assert sorted(end.pid for end in ends) == sorted([child.pid, os.getpid()])
        with sockets.connections_between(child.pid, os.getpid(), {port + 1}) as ends:
            assert ends == []
