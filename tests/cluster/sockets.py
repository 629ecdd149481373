"""Which sockets the kernel has for a set of processes: /proc/net, joined with what each process holds open."""

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that takes connections (TCP) or datagrams (UDP)."""

    pid: int
    protocol: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def listening(pids: Iterable[int]) -> list[Listening]:
    """All listening sockets of the processes. One that several processes hold is listed for each."""
    owners: dict[str, list[int]] = {}
    for pid in pids:
        for inode in set(_inodes(pid)):
            owners.setdefault(inode, []).append(pid)
    return [
        Listening(pid, protocol, host, port)
        for protocol in ("tcp", "tcp6", "udp", "udp6")
        for host, port, inode in _sockets(protocol)
        for pid in owners.get(inode, ())
    ]


def _sockets(protocol: str) -> Iterator[tuple[str, int, str]]:
    path = Path("/proc/net") / protocol
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        columns = line.split()
        address, state, inode = columns[1], columns[3], columns[9]
        if protocol.startswith("tcp") and state != _LISTEN:
            continue
        host, _, port = address.partition(":")
        yield _host(host), int(port, 16), inode


def _host(text: str) -> str:
    """The kernel writes addresses as 32-bit words in its own byte order, which is little-endian here."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(raw))


def _inodes(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # ended
        return
    for name in names:
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
        if found:
            yield found[1]
