"""Where workers run: on the Ray of this machine, which is ours, or on a Ray cluster that others own.

On our own, workers end with us. On a cluster they are detached actors: they outlive the controller that made them, and
the next one finds them by name. Blocking calls; no decisions here.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.config import ClusterConfig, WorkerConfig
from common.messages import Role
from deploy.ray_local import resource_name
from deploy.worker_actor import WORKER_CLASS, WorkerActor
from deploy.worker_env import has_gpu, num_cores, num_threads_per_worker, worker_environment, worker_settings

RAY_NAMESPACE = "pdserve"
# An actor that has a place says who it is at once.
IDENTITY_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that an earlier controller started. `handle` is Ray's, which has no type.

    `placed_as`: the role that its place was asked for; it may have changed its own since.
    """

    role: Role
    worker_id: str
    handle: Any
    placed_as: Role


class Placement(Protocol):
    """What `deploy.ray_pool` needs of the place."""

    is_lasting: bool  # workers outlive their controller

    def create(self, role: Role, worker_id: str) -> Any:
        """A new worker; returns its actor at once."""
        ...

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        """What a worker of the role is made with, or takes the role with."""
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
        config = self.worker_config(role, worker_id)
        options = {"runtime_env": {"env_vars": worker_environment(config, has_gpu=has_gpu())}}
        return _actor(role, options).remote(self._actor_class, config.model_dump_json())

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        settings = worker_settings(self._config, role, self._num_threads)
        config = self._config.model_copy(update={f"{role.value}_worker": settings})
        return config.worker_config(role.value, worker_id)

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
        config_json = self.worker_config(role, worker_id).model_dump_json()
        return actor.remote(self._actor_class, config_json, is_fitted_to_node=True)

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        return self._config.worker_config(role.value, worker_id)

    def find(self) -> list[FoundWorker]:
        import ray

        found: dict[str, FoundWorker] = {}
        for name in sorted(ray.util.list_named_actors()):
            namespace, *rest = name.split("/")
            if namespace != self._config.namespace or len(rest) != 3:
                continue
            try:
                handle = ray.get_actor(name)
            except ValueError:  # ended since it was listed
                continue
            worker = _found(Role(rest[0]), rest[1], handle)
            found.setdefault(worker.worker_id, worker)
        return list(found.values())

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        """Ask Ray's autoscaler. It remembers the last request of the whole Ray cluster until the next one."""
        from ray.autoscaler.sdk import request_resources

        bundles = [{resource_name(role): 1} for role in Role for _ in range(num_workers[role.value])]
        request_resources(bundles=bundles)


def _found(placed_as: Role, first_id: str, handle: Any) -> FoundWorker:
    """What the actor serves now; one that does not answer has got no place yet, so it is what it was made for."""
    import ray

    try:
        identity = ray.get(handle.identity.remote(), timeout=IDENTITY_LIMIT_S)
    except Exception:  # Ray's own; what becomes of it is told when it is asked to start
        return FoundWorker(placed_as, first_id, handle, placed_as)
    return FoundWorker(Role(identity["role"]), identity["worker_id"], handle, placed_as)


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
