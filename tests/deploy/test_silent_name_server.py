"""Links stand although no name server answers: with what a worker finds in its environment, in a network of its own."""

import os
import shutil
import subprocess
import sys

import pytest

from common.config import WorkerSettings
from deploy.worker_env import worker_environment

LINK_TIMEOUT_S = 8  # longer than two looks of a second, shorter than the ten that a C library waits by default
IN_A_NETWORK_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"]
SILENT_NAME_SERVER = """
ip link set lo up
echo nameserver 127.0.0.53 > "$0/resolv.conf"; mount --bind "$0/resolv.conf" /etc/resolv.conf
echo hosts: files dns > "$0/nsswitch.conf"; mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
exec "$1" -c "$2"
"""
MEET = f"""
import socket
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous

silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.53", 53))
store = RendezvousStore("127.0.0.1", {LINK_TIMEOUT_S})
join_rendezvous("127.0.0.1", store.port, "link", {LINK_TIMEOUT_S}).set("key", "value")
silent.recv(1)  # it was asked: a missing look-up would prove nothing
print("met")
"""


def can_isolate() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*IN_A_NETWORK_OF_ITS_OWN, "ip link set lo up"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_isolate(), reason="needs unshare and ip, and the right to use them")
def test_the_ends_of_a_link_meet_although_no_name_server_answers(tmp_path: object) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RES_OPTIONS", raising=False)
        env = inherited | worker_environment(WorkerSettings(), has_gpu=False)
    command = [*IN_A_NETWORK_OF_ITS_OWN, SILENT_NAME_SERVER, str(tmp_path), sys.executable, MEET]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout == "met\n", result.stderr


def test_an_operators_own_options_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:3")
    assert worker_environment(WorkerSettings(), has_gpu=False)["RES_OPTIONS"] == "timeout:3"
