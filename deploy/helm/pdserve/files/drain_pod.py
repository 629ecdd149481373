"""preStop of a worker pod: let Ray place nothing here any more, drain the worker, and wait until it has gone.

Exits 0 in any case: a pod without a worker, or a router that is away, must not keep the pod from ending.
Usage: drain_pod.py SECONDS. Environment: PDSERVE_URL (a router), POD_IP, and PDSERVE_ROUTER_ADMIN_KEY_FILE where
the routers have an admin key.
"""

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

POLL_INTERVAL_S = 0.5
REPLY_TIMEOUT_S = 5.0
RAY_TIMEOUT_S = 15.0


def close_node(limit_s: float) -> None:
    """Tell Ray that this node is about to go: what runs here goes on, and the replacement starts elsewhere."""
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(int(limit_s))], timeout=RAY_TIMEOUT_S, check=False)


def admin_headers() -> dict[str, str]:
    """The admin key, where the routers ask for one."""
    path = os.environ.get("PDSERVE_ROUTER_ADMIN_KEY_FILE", "")
    key = Path(path).read_text().strip() if path else ""
    return {"x-admin-key": key} if key else {}


def worker_here(url: str, pod_ip: str) -> str | None:
    """The id of the worker that a router sees at this pod's address, or None."""
    request = urllib.request.Request(f"{url}/admin/v1/state", headers=admin_headers())
    with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as reply:
        workers = json.load(reply)["workers"]
    here = [str(worker["worker_id"]) for worker in workers if worker["address"].rpartition(":")[0] == pod_ip]
    return here[0] if here else None


def ask_to_drain(url: str, worker_id: str, grace_s: float) -> None:
    target = f"{url}/admin/v1/workers/{urllib.parse.quote(worker_id, safe='')}/drain"
    body = json.dumps({"grace_s": grace_s}).encode()
    headers = {"content-type": "application/json", **admin_headers()}
    request = urllib.request.Request(target, body, headers, method="POST")
    urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S).close()


def drain(url: str, pod_ip: str, limit_s: float) -> None:
    """Return when no router sees this pod's worker any more, or after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    worker_id = worker_here(url, pod_ip)
    if worker_id is None:
        return
    ask_to_drain(url, worker_id, limit_s)
    while worker_here(url, pod_ip) == worker_id and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)


def main() -> None:
    limit_s = float(sys.argv[1])
    close_node(limit_s)
    drain(os.environ["PDSERVE_URL"], os.environ["POD_IP"], limit_s - RAY_TIMEOUT_S)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        print(f"drain_pod: {type(error).__name__}", file=sys.stderr)
