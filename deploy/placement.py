"""Where workers run: on the Ray of this machine, which is ours, or on a Ray cluster that others own.

On our own, workers end with us. On a cluster they are detached actors: they outlive the controller that made them, and
the next one finds them by name. Blocking calls; no decisions here.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.config import ClusterConfig
from common.messages import Role
from deploy.ray_local import resource_name
from deploy.worker_actor import WORKER_CLASS, WorkerActor
from deploy.worker_env import has_gpu, num_cores, num_threads_per_worker, worker_environment, worker_settings

RAY_NAMESPACE = "pdserve"


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that an earlier controller started. `handle` is Ray's, which has no type."""

    role: Role
    worker_id: str
    handle: Any


class Placement(Protocol):
    """What `deploy.ray_pool` needs of the place."""

    is_lasting: bool  # workers outlive their controller

    def create(self, role: Role, worker_id: str) -> Any:
        """A new life of a worker; returns its actor at once."""
        ...

    def find(self) -> list[FoundWorker]:
        """Workers of this cluster that run already."""
        ...

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        """Have room made for so many workers of each role, where something can make room."""
        ...


class LocalPlacement:
    """All workers on this machine, sharing its cores; on loopback."""

    is_lasting = False

    def __init__(self, config: ClusterConfig, actor_class: str = WORKER_CLASS) -> None:
        self._config = config
        self._actor_class = actor_class
        self._num_threads = num_threads_per_worker(config, num_cores())

    def create(self, role: Role, worker_id: str) -> Any:
        settings = worker_settings(self._config, role, self._num_threads)
        config = self._config.model_copy(update={f"{role.value}_worker": settings})
        options = {"runtime_env": {"env_vars": worker_environment(settings, has_gpu=has_gpu())}}
        worker_config = config.worker_config(role.value, worker_id).model_dump_json()
        return _actor(role, options).remote(self._actor_class, worker_config)

    def find(self) -> list[FoundWorker]:
        return []

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        return


class ClusterPlacement:
    """A worker on whatever node offers its role's resource; address, threads and GPU are found out there."""

    is_lasting = True

    def __init__(self, config: ClusterConfig, actor_class: str = WORKER_CLASS) -> None:
        self._config = config
        self._actor_class = actor_class

    def create(self, role: Role, worker_id: str) -> Any:
        # A name of its own for every life: a dead actor's name is free only some time later.
        name = f"{self._config.namespace}/{role.value}/{worker_id}/{secrets.token_hex(4)}"
        actor = _actor(role, {"name": name, "namespace": RAY_NAMESPACE, "lifetime": "detached"})
        worker_config = self._config.worker_config(role.value, worker_id).model_dump_json()
        return actor.remote(self._actor_class, worker_config, is_fitted_to_node=True)

    def find(self) -> list[FoundWorker]:
        import ray

        found: dict[str, FoundWorker] = {}
        for name in sorted(ray.util.list_named_actors()):
            namespace, *rest = name.split("/")
            if namespace != self._config.namespace or len(rest) != 3 or rest[1] in found:
                continue
            try:
                handle = ray.get_actor(name)
            except ValueError:  # ended since it was listed
                continue
            found[rest[1]] = FoundWorker(Role(rest[0]), rest[1], handle)
        return list(found.values())

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        """Ask Ray's autoscaler. It remembers the last request of the whole Ray cluster until the next one."""
        from ray.autoscaler.sdk import request_resources

        bundles = [{resource_name(role): 1} for role in Role for _ in range(num_workers[role.value])]
        request_resources(bundles=bundles)


def _actor(role: Role, options: Mapping[str, object]) -> Any:
    import ray

    return ray.remote(WorkerActor).options(
        num_cpus=0,
        resources={resource_name(role): 1},
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=8,  # `wait` blocks one of them most of the time
        **options,
    )
