"""Free memory is what the machine has left, or less where a control group says so."""

from pathlib import Path

from deploy.worker.memory import free_memory


def machine(root: Path, available_kb: int) -> None:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  9 kB\nMemAvailable:   {available_kb} kB\n")


def write(root: Path, name: str, text: str) -> None:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_limits_gives_what_it_has(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    assert free_memory(tmp_path) == 2048 << 10
    write(tmp_path, "memory.max", "max\n")
    write(tmp_path, "memory.current", "5\n")
    assert free_memory(tmp_path) == 2048 << 10


def test_a_limit_counts_less_what_is_used_of_it(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    write(tmp_path, "memory.max", f"{1 << 20}\n")
    write(tmp_path, "memory.current", f"{1 << 18}\n")
    assert free_memory(tmp_path) == (1 << 20) - (1 << 18)


def test_the_older_files_are_read_too(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    write(tmp_path, "memory/memory.limit_in_bytes", "1000")
    write(tmp_path, "memory/memory.usage_in_bytes", "1500")
    assert free_memory(tmp_path) == 0
