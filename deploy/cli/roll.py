"""`pdserve roll`: replaces every worker, one at a time, while the cluster serves.

A worker is drained, and its pool starts another; or, with a release of the chart, its pod is deleted, whose hook drains
it, and the new pod has the release's new image and settings. A pool of one gets a second worker first.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploy.cli.progress import progress
from deploy.client.admin import AdminClient, AdminFailed
from deploy.client.waiting import ROLES, wait_for_sizes, wait_until_gone, wait_until_settled

Worker = Mapping[str, Any]
Remove = Callable[[Worker], None]


def run_roll(url: str, roles: Sequence[str], timeout_s: float, remove: Remove | None = None) -> None:
    """Prefill workers first. Each step waits up to `timeout_s`; raises Unhealthy where it takes longer."""
    client = AdminClient(url)
    remove = remove or (lambda worker: client.drain(str(worker["worker_id"]), None))
    wait_until_settled(client, timeout_s, _report)
    num_replaced = 0
    for role in [role for role in ROLES if role in roles]:
        num_replaced += roll_pool(client, role, remove, timeout_s)
    print(f"done: {num_replaced} workers were replaced")


def roll_pool(client: AdminClient, role: str, remove: Remove, timeout_s: float) -> int:
    """Replace the workers that the pool has now; returns how many."""
    old = [worker for worker in client.state()["workers"] if worker["role"] == role]
    if len(old) == 1:
        progress("roll", f"{role} has one worker: a second one serves while it is replaced")
        client.scale({role: 2})
        wait_for_sizes(client, {role: 2}, timeout_s, _report)
    for worker in old:
        progress("roll", f"{worker['worker_id']} finishes what it has and ends")
        remove(worker)
        if len(old) == 1:
            client.scale({role: 1})
        wait_until_gone(client, worker, timeout_s)
        wait_for_sizes(client, {role: len(old)}, timeout_s, _report)
    return len(old)


def _report(text: str) -> None:
    progress("roll", text)


def pod_remover(release: str, namespace: str) -> Remove:
    """Deletes the pod of a worker by its address, among the release's own. `kubectl` is on PATH and may do so."""
    kubectl = ["kubectl", "--namespace", namespace]

    def remove(worker: Worker) -> None:
        selector = f"app.kubernetes.io/instance={release},ray.io/node-type=worker"
        pods = json.loads(_run([*kubectl, "get", "pods", "--selector", selector, "--output", "json"]))["items"]
        _run([*kubectl, "delete", "pod", pod_of(worker, pods), "--wait=false"])

    return remove


def pod_of(worker: Worker, pods: Sequence[Mapping[str, Any]]) -> str:
    """The name of the pod whose address the worker has. Raises AdminFailed."""
    host = str(worker["address"]).rpartition(":")[0].strip("[]")
    for pod in pods:
        if any(address["ip"] == host for address in pod.get("status", {}).get("podIPs", ())):
            return str(pod["metadata"]["name"])
    raise AdminFailed(f"no pod of the release has the address of {worker['worker_id']}, {host}: is --release right?")


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise AdminFailed(f"{command[0]} is not on PATH") from error
    if done.returncode != 0:
        raise AdminFailed(f"{' '.join(command[:5])}: {done.stderr.strip()}")
    return done.stdout
