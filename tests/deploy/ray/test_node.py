"""How a worker fits itself to its Ray node; the look at a real node is in test_deploy_ray."""

import pytest

from deploy.ray.node import threads_of


@pytest.mark.parametrize(
    ("resources", "num_cores", "threads"),
    [
        ({"CPU": 8.0, "pd_prefill": 1.0}, 64, 8),
        ({"CPU": 64.0, "pd_prefill": 2.0, "pd_decode": 2.0}, 64, 16),
        ({"pd_decode": 1.0}, 16, 16),
        ({"CPU": 2.0, "pd_decode": 4.0}, 16, 1),
        ({}, 4, 4),
    ],
    ids=["a container's limit", "shared by four", "no CPUs given to Ray", "fewer cores than workers", "unknown node"],
)
def test_the_cores_of_a_node_are_shared_by_the_workers_that_it_may_host(
    resources: dict[str, float], num_cores: int, threads: int
) -> None:
    assert threads_of(resources, num_cores) == threads
