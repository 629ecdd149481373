"""Two ends of a link for tests: both in this process, or one in a process of its own that can be killed."""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from kvtransfer.links.build import LinkPlan, build_link
from kvtransfer.links.gloo import RECEIVER_END
from kvtransfer.links.meeting import MeetingPoint, meet
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import Link
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
SECRET = b"what the control stream has told the two ends"


def plan(port: int, prefix: str, rank: int, timeout_s: float = TIMEOUT_S) -> LinkPlan:
    return LinkPlan("gloo", HOST, port, prefix, rank, HOST, torch.device("cpu"), timeout_s, SECRET)


def build_end(
    transport: str, store: RendezvousStore | int, prefix: str, rank: int, timeout_s: float = TIMEOUT_S
) -> ProcessGroupLink:
    """One end. Where the ends must meet, the store tells the sender where: a control stream does it in the handoff."""
    port = store if isinstance(store, int) else store.port
    wanted = replace(plan(port, prefix, rank, timeout_s), transport=transport)
    if transport != "shm":
        return build_link(wanted)
    notes = join_rendezvous(HOST, port, prefix, timeout_s)
    if rank == RECEIVER_END:
        point = MeetingPoint()
        notes.set("point", f"{point.name} {point.token.hex()}")
        try:
            return build_link(replace(wanted, meeting=point))
        finally:
            point.close()
    name, token = notes.get("point").decode().split()
    return build_link(replace(wanted, meeting=meet(name, bytes.fromhex(token), timeout_s)))


def build_both(
    store: RendezvousStore, prefix: str, transport: str = "gloo"
) -> tuple[ProcessGroupLink, ProcessGroupLink]:
    """(receiver's end, sender's end)."""
    with ThreadPoolExecutor(2) as executor:
        ends = [executor.submit(build_end, transport, store, prefix, rank) for rank in (0, 1)]
        return ends[0].result(), ends[1].result()


def new_prefix() -> str:
    return f"test/{secrets.token_hex(8)}"


def receive(link: Link, buffer: torch.Tensor) -> Future[None]:
    future: Future[None] = Future()
    link.receive(buffer, lambda error: _finish(future, error))
    return future


def send(link: Link, buffer: torch.Tensor) -> Future[None]:
    future: Future[None] = Future()
    link.send(buffer, lambda error: _finish(future, error))
    return future


def _finish(future: Future[None], error: Exception | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@dataclass
class RemoteEnd:
    """The other end in a child process, which reads commands from its stdin. Killed at the end if it still lives."""

    port: int
    prefix: str
    rank: int
    transport: str = "gloo"
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> "RemoteEnd":
        command = [
            sys.executable,
            "-m",
            "tests.kvtransfer.links.link_tools",
            str(self.port),
            self.prefix,
            str(self.rank),
            self.transport,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

        self._await("started")  # its imports take longer than a link
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def await_ready(self) -> None:
        """Its end of the link stands."""
        self._await("ready")

    def _await(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n"

    def command(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


def _serve(port: int, prefix: str, rank: int, transport: str) -> None:
    """Commands: "send N VALUE" and "receive N", until stdin ends."""
    print("started", flush=True)
    link = build_end(transport, port, prefix, rank)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        if verb == "send":
            link.send(torch.full((int(numbers[0]),), int(numbers[1]), dtype=torch.uint8), lambda _: None)
        else:
            link.receive(torch.empty(int(numbers[0]), dtype=torch.uint8), lambda _: None)


_STRANGER = """
import socket, sys
words = [bytes.fromhex(line) for line in iter(sys.stdin.readline, "go\\n")]
address = sys.argv[1], int(sys.argv[2])
held = [socket.create_connection(address, timeout=60) for _ in words]
for each, word in zip(held, words): each.sendall(word)
print("said", flush=True)
sys.stdin.read()
"""


@contextmanager
def strangers_at(host: str, port: int, words: Sequence[bytes]) -> Iterator[None]:
    """A process that has connected once for each word, and said it; the connections end with the context.

    Not in this process: what a process connects itself is the link's.
    """
    command = [sys.executable, "-I", "-S", "-c", _STRANGER, host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(f"{word.hex()}\n" for word in words) + "go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "said\n"
        yield
        process.stdin.close()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def listening_addresses() -> set[str]:
    """Local addresses (hex, as the kernel prints them) on which this process listens, IPv4 and IPv6."""
    inodes = {_inode(fd) for fd in os.listdir("/proc/self/fd")} - {None}
    addresses = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for columns in (line.split() for line in list(lines)[1:]):
                if columns[3] == "0A" and columns[9] in inodes:
                    addresses.add(columns[1].partition(":")[0])
    return addresses


def _inode(fd: str) -> str | None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    return target[len("socket:[") : -1] if target.startswith("socket:[") else None


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
    assert threading.current_thread() is threading.main_thread()
