"""What a worker process finds in its environment: threads, interfaces, name look-ups, the kernels' interpreter.

Workers on one machine share its cores: each computes with its share of them, and threads that wait sleep instead of
spinning on a core that another worker could use.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from common.values.config import ClusterConfig, WorkerSettings
from common.values.messages import Role
from deploy.worker.cpu_quota import cpu_quota

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
SHORT_LOOKUPS = "timeout:1 attempts:2"  # resolv.conf(5): seconds, tries


def num_threads_per_worker(config: ClusterConfig, num_cores: int) -> int:
    """An equal share of the cores for each worker that the cluster starts with."""
    return max(1, num_cores // max(1, config.pools.prefill + config.pools.decode))


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, or fewer where a container's quota is less."""
    quota = cpu_quota()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def gpu_names(root: Path = Path("/")) -> list[str]:
    """The NVIDIA GPUs that a worker may use, as CUDA_VISIBLE_DEVICES names them; `root` is for tests.

    CUDA counts those that it finds: in a container that was given /dev/nvidia3 alone, that one is its number 0.
    """
    if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in shown.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(root.glob("dev/nvidia[0-9]*"))]


def gpu_of(config: ClusterConfig, role: Role, worker_id: str, gpus: Sequence[str]) -> str | None:
    """Which of this machine's GPUs a worker gets: each the next, prefill workers first; None where there is none."""
    number = worker_id.rpartition("-")[2]
    before = config.pools.prefill if role is Role.DECODE else 0
    return gpus[(before + int(number)) % len(gpus)] if gpus and number.isdigit() else None


def has_gpu() -> bool:
    """True when a driver has made a GPU visible. Asked without torch: the caller must not load it."""
    return any(Path(device).exists() for device in _GPU_DEVICES)


def worker_settings(config: ClusterConfig, role: Role, num_threads: int) -> WorkerSettings:
    """The pool's settings, with the thread count that is left to us filled in."""
    settings = config.prefill_worker if role is Role.PREFILL else config.decode_worker
    return settings if settings.num_threads else settings.model_copy(update={"num_threads": num_threads})


def worker_environment(settings: WorkerSettings, *, has_gpu: bool) -> dict[str, str]:
    """Environment variables of a worker's process, over what it inherits; of RES_OPTIONS this process's own stands."""
    env = {
        "OMP_NUM_THREADS": str(settings.num_threads),
        "MKL_NUM_THREADS": str(settings.num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        # torch's TCPStore asks the name server for the name of each peer, only to log it. A silent one would hold the
        # first link up for ten seconds. Read by the C library at a process's first look-up, so set before that.
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", SHORT_LOOKUPS),
    }
    if settings.host.startswith("127."):
        env["GLOO_SOCKET_IFNAME"] = "lo"
        env["NCCL_SOCKET_IFNAME"] = "lo"
    if settings.attention == "triton" and not has_gpu:
        env["TRITON_INTERPRET"] = "1"
    return env | (_nccl_environment() if has_gpu else {})


def _nccl_environment() -> dict[str, str]:
    """A dead peer may not end this process, which torch's watchdog would do: links end by themselves. The rest is what
    an operator may set otherwise: queues for many links, and few of the GPU's processors for each."""
    advised = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_MAX_P2P_NCHANNELS": "4"}
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        **{name: os.environ.get(name, value) for name, value in advised.items()},
    }
