"""Links stand although no name server answers: with what a worker puts in its environment, in a network of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.values.config import WorkerSettings
from deploy.worker.env import worker_environment

LINK_TIMEOUT_S = 8  # longer than two looks of a second, shorter than the ten that a C library waits by default
IN_A_NETWORK_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"]
SILENT_NAME_SERVER = """
ip link set lo up
echo nameserver 127.0.0.53 > "$0/resolv.conf"; mount --bind "$0/resolv.conf" /etc/resolv.conf
echo hosts: files dns > "$0/nsswitch.conf"; mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
exec "$1" -c "$2"
"""
MEET = f"""
import os, socket
from common.values.config import WorkerSettings
from deploy.worker.env import worker_environment
os.environ.update(worker_environment(WorkerSettings(), has_gpu=False))  # as `pdserve worker` does
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous

silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.53", 53))
store = RendezvousStore("127.0.0.1", {LINK_TIMEOUT_S})
join_rendezvous("127.0.0.1", store.port, "link", {LINK_TIMEOUT_S}).set("key", "value")
silent.settimeout(1)
silent.recv(1)  # it was asked: a missing look-up would prove nothing
print("met")
"""


def test_the_ends_of_a_link_meet_although_no_name_server_answers(tmp_path: Path) -> None:
    if not _run_alone(tmp_path, "print()").stdout:
        pytest.skip("needs unshare, ip and mount, and the right to use them")
    result = _run_alone(tmp_path, MEET)
    assert result.stdout == "met\n", result.stderr


def _run_alone(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [*IN_A_NETWORK_OF_ITS_OWN, SILENT_NAME_SERVER, str(directory), sys.executable, program]
    env = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_an_operators_own_options_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:3")
    assert worker_environment(WorkerSettings(), has_gpu=False)["RES_OPTIONS"] == "timeout:3"
