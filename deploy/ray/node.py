"""Fits a worker to the Ray node that it is on: its address, its threads, its GPU.

Runs in the actor, before torch is loaded.
"""

import os
from typing import Any

from common.values.config import WorkerConfig
from common.values.messages import Role
from deploy.config.bind_checks import check_worker_host
from deploy.ray.local import resource_name
from deploy.worker.env import has_gpu, num_cores, worker_environment


def fit_to_node(config_json: str) -> str:
    """The configuration with what the node decides, and the environment to match."""
    import ray as untyped_ray

    ray: Any = untyped_ray  # half of it has no types
    config = WorkerConfig.model_validate_json(config_json)
    node_id = ray.get_runtime_context().get_node_id()
    resources: dict[str, Any] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id), {})
    num_threads = config.num_threads or threads_of(resources, num_cores())
    # Of Ray's `util` only what `import ray` has loaded: the address by which other nodes reach this one.
    fitted = config.model_copy(update={"host": ray.util.get_node_ip_address(), "num_threads": num_threads})
    check_worker_host(fitted.host, fitted.tls, insecure=fitted.insecure)
    os.environ.update(worker_environment(fitted, has_gpu=has_gpu()))
    if not fitted.num_gpus:
        _show_gpus()
    return fitted.model_dump_json()


def threads_of(resources: dict[str, Any], num_cores: int) -> int:
    """A share of the node's cores for each worker that it may host. Of a container's limit only Ray knows."""
    limit = int(resources.get("CPU", 0)) or num_cores
    num_workers = sum(int(resources.get(resource_name(role), 0)) for role in Role)
    return max(1, min(limit, num_cores) // max(1, num_workers))


def _show_gpus() -> None:
    """Ray hides the GPUs from actors that ask it for none; we place by role, and a worker uses those of its node."""
    if has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
