"""Where workers run: on the Ray of this machine, which is ours, or on a Ray cluster that others own.

On our own, workers end with us. On a cluster they are detached actors: they outlive the controller that made them, and
the next one finds them by name. Blocking calls; no decisions here.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.values.config import ClusterConfig, WorkerConfig
from common.values.messages import Role
from deploy.ray.local import resource_name
from deploy.ray.worker_actor import WORKER_CLASS, WorkerActor
from deploy.worker.env import (
    gpu_names,
    gpu_of,
    has_gpu,
    num_cores,
    num_threads_per_worker,
    worker_environment,
    worker_settings,
)

RAY_NAMESPACE = "pdserve"
# An actor that has a place says who it is at once.
IDENTITY_LIMIT_S = 2.0
# One that has a place and is silent for so long is frozen.
FROZEN_S = 20.0
# Where Ray's processes write what is wrong before a worker can say anything itself.
_TELLING_LOGS = ("worker-*.err", "raylet.err", "runtime_env_setup-*.log")
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that an earlier controller started. `handle` is Ray's, which has no type.

    `placed_as`: the role that its place was asked for; it may have changed its own since.
    """

    role: Role
    worker_id: str
    handle: Any
    placed_as: Role


@dataclass(frozen=True, slots=True, eq=False)
class NamedActor:
    """An actor, and the role and worker id that it was made for."""

    placed_as: Role
    first_id: str
    handle: Any


# What each of the actors serves, as (role, worker id); None for those that are silent for so many seconds.
Ask = Callable[[Sequence[NamedActor], float], list[tuple[Role, str] | None]]


class Placement(Protocol):
    """What `deploy.ray.pools` needs of the place."""

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

    def what_it_waits_for(self, role: Role) -> str:
        """Of a worker that has had no process for long, for people."""
        ...


class LocalPlacement:
    """All workers on this machine, sharing its cores; on loopback."""

    is_lasting = False

    def __init__(self, config: ClusterConfig, log_dir: Path, actor_class: str = WORKER_CLASS) -> None:
        """`log_dir`: where Ray writes what its processes say."""
        self._config = config
        self._log_dir = log_dir
        self._actor_class = actor_class
        self._num_threads = num_threads_per_worker(config, num_cores())

    def create(self, role: Role, worker_id: str) -> Any:
        config = self.worker_config(role, worker_id)
        env = worker_environment(config, has_gpu=has_gpu())
        if (gpu := gpu_of(self._config, role, worker_id, gpu_names())) is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        return _actor(role, {"runtime_env": {"env_vars": env}}).remote(self._actor_class, config.model_dump_json())

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        settings = worker_settings(self._config, role, self._num_threads)
        config = self._config.model_copy(update={f"{role.value}_worker": settings})
        return config.worker_config(role.value, worker_id)

    def find(self) -> list[FoundWorker]:
        return []

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        return

    def what_it_waits_for(self, role: Role) -> str:
        return f"its process says nothing yet; the last line of the logs: {last_line_below(self._log_dir)}"


class ClusterPlacement:
    """A worker on whatever node offers its role's resource; address, threads and GPU are found out there."""

    is_lasting = True

    def __init__(self, config: ClusterConfig, actor_class: str = WORKER_CLASS) -> None:
        self._config = config
        self._actor_class = actor_class

    def create(self, role: Role, worker_id: str) -> Any:
        # A name of its own for every life: a dead actor's name is free only some time later.
        name = f"{self._config.namespace}/{role.value}/{worker_id}/{secrets.token_hex(4)}"
        config = self.worker_config(role, worker_id)
        reserved = {"num_gpus": reserved_gpus(config)}
        actor = _actor(role, {"name": name, "namespace": RAY_NAMESPACE, "lifetime": "detached", **reserved})
        return actor.remote(self._actor_class, config.model_dump_json(), is_fitted_to_node=True)

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        return self._config.worker_config(role.value, worker_id)

    def find(self) -> list[FoundWorker]:
        import ray

        found, ended = tell_apart(self._named_actors(), _ask)
        for actor in ended:
            ray.kill(actor.handle, no_restart=True)
        return found

    def _named_actors(self) -> list[NamedActor]:
        import ray

        actors = []
        for name in sorted(ray.util.list_named_actors()):
            namespace, *rest = name.split("/")
            if namespace != self._config.namespace or len(rest) != 3:
                continue
            try:
                actors.append(NamedActor(Role(rest[0]), rest[1], ray.get_actor(name)))
            except ValueError:  # ended since it was listed
                continue
        return actors

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        """Ask Ray's autoscaler. It remembers the last request of the whole Ray cluster until the next one."""
        from ray.autoscaler.sdk import request_resources

        bundles = [self._bundle(role) for role in Role for _ in range(num_workers[role.value])]
        request_resources(bundles=bundles)

    def _bundle(self, role: Role) -> dict[str, float]:
        bundle: dict[str, float] = {resource_name(role): 1}
        if num_gpus := reserved_gpus(self.worker_config(role, "")):
            bundle["GPU"] = num_gpus
        return bundle

    def what_it_waits_for(self, role: Role) -> str:
        wanted = " and ".join(f"{number:g} {name}" for name, number in self._bundle(role).items())
        return f"waits for a Ray node that offers {wanted}"


def reserved_gpus(config: WorkerConfig) -> float:
    """Of an actor: its ranks are processes of its own, so it reserves for them all, on its one node."""
    return config.num_gpus * config.tensor_parallel_size


def tell_apart(actors: Sequence[NamedActor], ask: Ask) -> tuple[list[FoundWorker], list[NamedActor]]:
    """Every actor under the worker id that is its own, and those that are to be ended, since they have none.

    One that is silent has no place yet, so it is what it was made for. Where that is another's id, it may have changed
    its role since: it is asked again, for longer, and is frozen if it still says nothing.
    """
    said = dict(zip(actors, ask(actors, IDENTITY_LIMIT_S), strict=True))
    ids = Counter(actor.first_id if answer is None else answer[1] for actor, answer in said.items())
    unclear = [actor for actor, answer in said.items() if answer is None and ids[actor.first_id] > 1]
    if unclear:
        said |= zip(unclear, ask(unclear, FROZEN_S), strict=True)
    found: dict[str, FoundWorker] = {}
    ended: list[NamedActor] = []
    for actor in sorted(actors, key=lambda actor: said[actor] is None):  # who answers comes first
        role, worker_id = said[actor] or (actor.placed_as, actor.first_id)
        if worker_id in found:
            ended.append(actor)
        else:
            found[worker_id] = FoundWorker(role, worker_id, actor.handle, actor.placed_as)
    return list(found.values()), ended


def last_line_below(directory: Path) -> str:
    """The last line of the log that was written to last, with its file's name; Ray's marks (`:job_id:`) are none."""
    logs = [path for pattern in _TELLING_LOGS for path in directory.glob(pattern)]
    newest_first = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
    told = ((line, path.name) for path in newest_first if (line := _last_line(path)))
    return next((f"{line} ({name})" for line, name in told), f"there is none below {directory}")


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith(":")), "")


def _ask(actors: Sequence[NamedActor], limit_s: float) -> list[tuple[Role, str] | None]:
    """All at once."""
    import ray

    asked = [actor.handle.identity.remote() for actor in actors]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    return [_identity(reference) if reference in answered else None for reference in asked]


def _identity(reference: Any) -> tuple[Role, str] | None:
    import ray

    try:
        identity = ray.get(reference)
    except Exception:  # Ray's own; the actor's fate is reported when it is asked to start
        return None
    return Role(identity["role"]), identity["worker_id"]


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
