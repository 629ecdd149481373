"""How much memory this process and its children may still take: what the machine has left, or the control group."""

from pathlib import Path

_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes. `root` is for tests. Shared memory counts as any other; /dev/shm's size does not limit it."""
    return min([_available(root / "proc/meminfo"), *_left(root / "sys/fs/cgroup")])


def _available(meminfo: Path) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _left(group: Path) -> list[int]:
    """Of version 2 or 1 of control groups, whichever there is; version 1 states no limit as a very large one."""
    found = []
    for limit, used in _FILES:
        try:
            found.append(max(0, int((group / limit).read_text()) - int((group / used).read_text())))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return found
