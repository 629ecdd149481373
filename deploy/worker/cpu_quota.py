"""How many CPUs the kernel lets this process use in a period: the quotas of its control groups, version 1 and 2.

Containers are limited so; the number of processors that they see is still the machine's.
"""

from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs, the least of the group's own quota and of those above it; None without any. `root` is for tests."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    folders = [folder for line in lines for folder in _folders(line, root / "sys/fs/cgroup")]
    return min((quota for folder in folders if (quota := _quota(folder)) is not None), default=None)


def _folders(line: str, mount: Path) -> Iterator[Path]:
    """From the group up to its mount, which in a container may be the group itself.

    `line` is HIERARCHY:CONTROLLERS:PATH (cgroups(7)); version 2 has the hierarchy 0 and names no controllers.
    """
    hierarchy, controllers, path = line.split(":", 2)
    if hierarchy != "0" and "cpu" not in controllers.split(","):
        return
    top = mount if hierarchy == "0" else mount / "cpu"
    group = top / path.strip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None
