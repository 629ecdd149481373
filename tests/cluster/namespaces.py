"""Several hosts on one machine: network namespaces joined by a bridge that is in a namespace of its own.

Nothing of the machine's own network is touched or reached: every interface and address is inside what is made here.
Needs root and iproute2; `why_not` says what is missing.
"""

import asyncio
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
_CLONE_NEWNET = 0x40000000
_NETWORK = "10.77.0"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface, `eth0`; `port_name` is the other end of its cable, at the bridge."""

    name: str
    namespace: str
    address: str
    switch: str
    port_name: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host; its process is the command itself."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def popen(self, command: Sequence[str], log_path: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with log_path.open("ab") as log:
            return subprocess.Popen(
                self.command(*command), stdout=log, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True
            )

    def counter(self, interface: str, name: str) -> int:
        """An interface's statistics, as `rx_bytes`."""
        path = f"/sys/class/net/{interface}/statistics/{name}"
        return int(subprocess.run(self.command("cat", path), capture_output=True, check=True).stdout)

    def peers(self) -> set[str]:
        """Addresses that established connections lead to."""
        shown = subprocess.run(self.command("ss", "-Htn", "state", "established"), capture_output=True, check=True)
        return {line.split()[3].rpartition(":")[0] for line in shown.stdout.decode().splitlines()}

    def unplug(self) -> None:
        """Packets are lost from now on, without an error."""
        _ip("-n", self.switch, "link", "set", self.port_name, "nomaster")

    def plug_in(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port_name, "master", "br0")

    def __str__(self) -> str:
        return self.name


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("ss"):
        return "iproute2 is not installed"
    name = f"pdst{os.getpid()}"
    for command in (
        ["netns", "add", name],
        ["-n", name, "link", "add", "br0", "type", "bridge"],
        ["netns", "del", name],
    ):
        done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            return f"network namespaces are not permitted: {done.stderr.strip()}"
    return ""


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """So many hosts that reach each other and nothing else; gone afterwards. End their processes before."""
    tag = f"pds{os.getpid()}"
    switch = f"{tag}-switch"
    made = [switch]
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        found = {}
        for idx, name in enumerate(names):
            host = Host(name, f"{tag}-{name}", f"{_NETWORK}.{idx + 1}", switch, f"port{idx}")
            _ip("netns", "add", host.namespace)
            made.append(host.namespace)
            _join(host)
            found[name] = host
        yield found
    finally:
        for namespace in made:
            _ip("netns", "del", namespace)


def _join(host: Host) -> None:
    cable = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("-n", host.switch, "link", "add", host.port_name, *cable)
    _ip("-n", host.switch, "link", "set", host.port_name, "master", "br0", "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class OnHost:
    """Runs our own code on a host: in a thread that has entered its namespace, and whose sockets are there."""

    def __init__(self, host: Host) -> None:
        self._executor = ThreadPoolExecutor(1, initializer=_enter, initargs=(host.namespace,))

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        return self._executor.submit(function).result()

    async def run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """A coroutine in an event loop of that thread."""
        return await asyncio.wrap_future(self._executor.submit(lambda: asyncio.run(work())))

    def close(self) -> None:
        self._executor.shutdown()


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


@contextmanager
def folder() -> Iterator[Path]:
    """For logs; short, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pdserve-net-") as path:
        yield Path(path)
