"""The CPUs of a container, as its control groups say."""

from pathlib import Path

import pytest

from deploy.worker import env
from deploy.worker.cpu_quota import cpu_quota


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/one/cpu.max": "400000 100000",
                "sys/fs/cgroup/pods/cpu.max": "300000 100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/docker/one\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ({}, None),
    ],
    ids=["version 2", "unlimited", "the least above", "version 1", "version 1 unlimited", "nonsense", "no groups"],
)
def test_the_quota_is_read_from_both_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (1000.0, None), (None, None)])
def test_threads_are_chosen_for_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int | None
) -> None:
    monkeypatch.setattr(env, "cpu_quota", lambda: None)
    all_cores = env.num_cores()
    monkeypatch.setattr(env, "cpu_quota", lambda: quota)
    assert env.num_cores() == (cores or all_cores)
