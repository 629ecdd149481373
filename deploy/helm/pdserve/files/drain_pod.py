"""preStop of a worker pod: ask a router to drain the worker in this pod, and wait until it has gone.

Exits 0 in any case: a pod without a worker, or a router that is away, must not keep the pod from ending.
Usage: drain_pod.py SECONDS. Environment: PDSERVE_URL (a router), POD_IP.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request

POLL_INTERVAL_S = 0.5


def worker_here(url: str, pod_ip: str) -> str | None:
    """The id of the worker that a router sees at this pod's address, or None."""
    with urllib.request.urlopen(f"{url}/admin/v1/state", timeout=5) as reply:
        workers = json.load(reply)["workers"]
    here = [str(worker["worker_id"]) for worker in workers if worker["address"].rpartition(":")[0] == pod_ip]
    return here[0] if here else None


def drain(url: str, pod_ip: str, limit_s: float) -> None:
    """Return when no router sees a worker here any more, or after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    worker_id = worker_here(url, pod_ip)
    if worker_id is not None:
        subprocess.run(["pdserve", "drain", worker_id], timeout=limit_s, check=True)
    while worker_id is not None and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
        worker_id = worker_here(url, pod_ip)


if __name__ == "__main__":
    try:
        drain(os.environ["PDSERVE_URL"], os.environ["POD_IP"], float(sys.argv[1]))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        print(f"drain_pod: {type(error).__name__}", file=sys.stderr)
