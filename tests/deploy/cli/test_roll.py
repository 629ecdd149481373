"""`pdserve roll` against a cluster on paper: who is removed in which order, and what is there meanwhile."""

from typing import Any

import pytest

from deploy.cli.roll import pod_of, roll_pool
from deploy.client.admin import AdminFailed


class PaperCluster:
    """Ready at once with whatever size is asked for; the youngest goes first, and what is removed is replaced."""

    def __init__(self, num_decode: int) -> None:
        self.num_wanted = num_decode
        self.workers: list[dict[str, Any]] = []
        self.log: list[str] = []
        self._num_births = 0
        self._fill()

    def _fill(self) -> None:
        while len(self.workers) > self.num_wanted:
            self.log.append(f"left {self.workers.pop()['incarnation']}")
        while len(self.workers) < self.num_wanted:
            self._num_births += 1
            name = f"life-{self._num_births}"
            self.workers.append({"worker_id": name, "incarnation": name, "role": "decode", "state": "ready"})

    def state(self) -> dict[str, Any]:
        return {"workers": list(self.workers), "pools": None}

    def scale(self, sizes: dict[str, int]) -> None:
        self.num_wanted = sizes["decode"]
        self._fill()

    def remove(self, worker: dict[str, Any]) -> None:
        self.workers = [other for other in self.workers if other is not worker]
        self.log.append(f"removed {worker['incarnation']}, {len(self.workers)} serve")
        self._fill()


def test_workers_are_replaced_one_after_another() -> None:
    cluster = PaperCluster(3)
    assert roll_pool(cluster, "decode", cluster.remove, 0.0) == 3  # type: ignore[arg-type]
    assert cluster.log == [f"removed life-{idx}, 2 serve" for idx in (1, 2, 3)]
    assert [worker["incarnation"] for worker in cluster.workers] == ["life-4", "life-5", "life-6"]


def test_the_only_worker_of_a_pool_is_replaced_while_another_serves() -> None:
    cluster = PaperCluster(1)
    assert roll_pool(cluster, "decode", cluster.remove, 0.0) == 1  # type: ignore[arg-type]
    assert cluster.log[0] == "removed life-1, 1 serve"
    assert [worker["incarnation"] for worker in cluster.workers] == ["life-2"]
    assert cluster.num_wanted == 1


def test_a_workers_pod_is_found_by_its_address() -> None:
    pods = [
        {"metadata": {"name": "pending"}, "status": {}},
        {"metadata": {"name": "a"}, "status": {"podIPs": [{"ip": "10.0.0.1"}]}},
        {"metadata": {"name": "b"}, "status": {"podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::2"}]}},
    ]
    assert pod_of({"worker_id": "w", "address": "10.0.0.1:4000"}, pods) == "a"
    assert pod_of({"worker_id": "w", "address": "[fd00::2]:4000"}, pods) == "b"
    with pytest.raises(AdminFailed, match=r"no pod of the release has the address of w, 10\.0\.0\.3"):
        pod_of({"worker_id": "w", "address": "10.0.0.3:4000"}, pods)
