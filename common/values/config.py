"""What can be configured, with defaults. Values only: `deploy/config/settings.py` reads them.

Frozen: values discovered at run time (ports, block counts) are arguments where they are needed, not config.
"""

import secrets
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Dtype = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "int8", "fp8_e4m3"]
Quantization = Literal["none", "int8", "int4"]
Attention = Literal["auto", "cpu", "triton"]
Transport = Literal["auto", "gloo", "shm", "nccl"]
SpeculationKind = Literal["ngram", "off"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "harmony"]
ReasoningParser = Literal["auto", "none", "think", "harmony"]

CPU_CACHE_BYTES = 512 << 20  # of a rank's KV cache where nothing is configured


class ModelConfig(BaseModel):
    """Which model, and how it is named to clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field("", description="Hugging Face directory or GGUF file; empty = the demo model")
    served_name: str = Field("", description="name in the API; default: the file or directory name")
    max_model_len: int = Field(0, ge=0, description="longest sequence in tokens; 0 = the model's own limit")


class TlsSettings(BaseModel):
    """Mutual TLS between the components, from mounted files that may be replaced at any time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert_file: str = Field("", description="PEM certificate of this component; {role} stands for what it is")
    key_file: str = Field("", description="its private key, PEM; {role} as above")
    ca_file: str = Field("", description="PEM certificates of the CA that signs them; alone: for commands")

    @model_validator(mode="after")
    def _is_complete(self) -> "TlsSettings":
        if bool(self.cert_file) != bool(self.key_file) or (self.cert_file and not self.ca_file):
            raise ValueError("cert_file, key_file and ca_file go together")
        return self

    @property
    def is_on(self) -> bool:
        return bool(self.cert_file)

    def paths_of(self, component: str) -> tuple[str, str, str]:
        """Certificate, key and CA of a component: router, prefill, decode or operator."""
        paths = (self.cert_file, self.key_file, self.ca_file)
        cert_file, key_file, ca_file = (path.replace("{role}", component) for path in paths)
        return cert_file, key_file, ca_file


class WorkerSettings(BaseModel):
    """What all workers of a pool share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Dtype = "auto"
    quantization: Quantization = Field("none", description="weights in fewer bits (on CPUs); equal on both workers")
    kv_cache_dtype: KVCacheDtype = Field("auto", description="auto = the model's; must be equal on both workers")
    attention: Attention = "auto"
    cuda_graphs: bool = Field(True, description="replay decode steps on a GPU instead of launching every kernel")
    host: str = Field("127.0.0.1", description="address to bind and to advertise")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 = any free one")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 = any free one")
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    num_blocks: int = Field(
        0, ge=0, description="KV blocks of each group of layers; 0 = as many as kv_cache_bytes holds"
    )
    kv_cache_bytes: int = Field(
        0, ge=0, description="memory for the KV cache, of each rank; 0 = what a GPU has left, 512 MiB on a CPU"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="part of a GPU's memory that a worker takes in all; less where several share one"
    )
    num_gpus: float = Field(
        0, ge=0, le=64, description="GPUs that each rank reserves from Ray; 0 = none, it uses those of its node"
    )
    max_num_seqs: int = Field(32, ge=1, description="sequences in one decode step")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one step (chunk size)")
    max_num_waiting: int = Field(256, ge=0, description="requests a worker queues before it refuses")
    gap_budget_s: float = Field(
        0.05, ge=0, description="a decode step takes no more prompt tokens than end within it; 0 = as many as fit"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="processes that a worker splits its model over, on one machine; on CPUs"
    )
    speculation: SpeculationKind = Field(
        "off", description="a decode worker guesses tokens by what stood behind the same words, where that is faster"
    )
    max_draft_tokens: int = Field(15, ge=1, le=32, description="guesses per sequence and step")
    max_loras: int = Field(4, ge=1, description="LoRA adapters in a worker's memory; the one not used for longest goes")
    num_threads: int = Field(0, ge=0, description="compute threads, of all ranks together; 0 = torch's choice")
    cpus: str = Field(
        "",
        pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$",
        description="processors of the compute threads of this pool's workers, as 0-3,8; empty = any",
    )
    transport: Transport = Field(
        "auto", description="auto = shm where both workers share a host's memory, else gloo; must fit on both"
    )
    digest: bool = Field(True, description="encrypt every KV chunk with AES-GCM; none with nccl and shm")
    plain_nccl: bool = Field(False, description="let KV cross the network unencrypted by nccl although TLS is on")
    min_chunk_bytes: int = Field(1 << 20, ge=1, description="layers are sent together until a chunk is this large")
    max_inflight_bytes: int = Field(32 << 20, ge=1, description="announced and not yet received, per pair")
    min_link_bytes_per_s: float = Field(
        50e6, ge=0, description="transfers over a slower link are counted as slow, and doctor warns of one"
    )
    link_timeout_s: float = Field(30.0, gt=0, description="a pair without progress for this long is rebuilt")
    max_step_s: float = Field(60.0, gt=0, description="a step that runs longer makes the worker unhealthy")
    lease_s: float = Field(3.0, gt=0, description="registration in Redis; renewed every third of it")


class WorkerConfig(WorkerSettings):
    """One prefill or decode worker."""

    role: Literal["prefill", "decode"]
    worker_id: str
    model: ModelConfig
    redis_url: str = ""
    namespace: str = "pdserve"
    tls: TlsSettings = TlsSettings()
    insecure: bool = False


class RouterSettings(BaseModel):
    """Routers: both public APIs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    router_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,128}$",
        description="name among the routers of the cluster; empty = one that no other has",
    )
    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(50051, ge=0, le=65535)
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="/metrics on a port of its own; None = on the HTTP port only"
    )
    # Up to 64 tokens no running stream waited longer than when the KV was shipped (the first token came sooner or
    # later by turns); from 128 on the streams paid (`tests/bench/local_prefill.py`, demo model on 2 cores, 2026-11-29).
    local_prefill_max_tokens: int = Field(64, ge=0, description="uncached tokens a decode worker prefills itself")
    balance_prefill_max_tokens: int = Field(
        512,
        ge=0,
        description="uncached tokens a decode worker prefills itself while prefill workers would take longer;"
        " needs local_prefill_max_tokens > 0",
    )
    max_num_queued: int = Field(256, ge=0, description="requests without a grant before new ones are refused")
    default_deadline_s: float = Field(600.0, gt=0)
    # Twenty seconds of the demo model on a laptop; its whole context would be minutes, and small models rarely stop.
    default_max_tokens: int = Field(
        1024,
        ge=0,
        description="tokens of a chat's answer where neither request nor model says; 0 = what the context holds",
    )
    lora: tuple[Annotated[str, Field(pattern=r"^[^=,\s]+=[^,]+$")], ...] = Field(
        (),
        description='LoRA adapters served as models, as "NAME=DIRECTORY,NAME=DIRECTORY"; workers read them there too',
    )
    tool_parser: ToolParser = Field("auto", description="how the model writes calls; auto = by its chat template")
    reasoning_parser: ReasoningParser = Field("auto", description="how it writes thoughts; auto = by its chat template")
    max_retries: int = Field(3, ge=0, description="replacements of a lost worker per request")
    worker_silence_s: float = Field(4.0, gt=0, description="a worker that says nothing for so long is lost")
    # Longer than `pdserve up` takes to replace a worker with a small model: 4 s at rest, 9 s measured on busy cores.
    pair_grace_s: float = Field(15.0, ge=0, description="how long requests wait when the last fitting worker is gone")
    max_body_bytes: int | None = Field(
        None, ge=1, description="of a request; not set = by the model's context, 1 MiB at least"
    )
    allowed_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")], ...] = Field(
        (),
        description='sites whose pages may call the API, as "https://app.example,https://b.example"; "*" = every one',
    )
    max_connections: int = Field(4096, ge=1, description="open connections of clients, of each of the two APIs")
    sse_keep_alive_s: float = Field(15.0, gt=0)
    drain_grace_s: float = Field(5.0, ge=0, description="time that running requests get to finish on shutdown")
    otlp_traces_endpoint: str = Field(
        "", description="OTLP/HTTP collector, http://host:4318/v1/traces; empty = no traces"
    )
    api_keys_file: str = Field("", description="tenants and the hashes of their keys; empty = no keys are asked for")
    admin_key: str = Field("", description="what /admin/v1 asks for; empty = open to all who reach the port")
    admin_key_file: str = Field("", description="file with the admin key, instead of admin_key")
    keep_requests: int = Field(1000, ge=0, description="finished requests kept for /admin/v1/requests")
    cert_file: str = Field("", description="PEM certificate that clients of both APIs see; empty = no TLS")
    key_file: str = Field("", description="its private key, PEM")

    @field_validator("allowed_origins", "lora", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The environment and flags have text only."""
        return [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_certificate_and_key(self) -> "RouterSettings":
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together")
        return self


def _unique_router_id() -> str:
    return f"router-{secrets.token_hex(4)}"


class RouterConfig(RouterSettings):
    """One router. Two of the same name would end each other's streams to the workers."""

    router_id: str = Field(default_factory=_unique_router_id, min_length=1)
    model: ModelConfig
    redis_url: str = ""
    namespace: str = "pdserve"
    tls: TlsSettings = TlsSettings()


class PoolSettings(BaseModel):
    """How many workers a cluster starts with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: int = Field(1, ge=0, le=1024)
    decode: int = Field(1, ge=0, le=1024)
    routers: int = Field(1, ge=1, le=64, description="routers that pdserve up starts, on ports that follow each other")
    drain_grace_s: float = Field(30.0, ge=0, description="how long a worker that leaves may finish what it has")
    start_limit_s: float = Field(600.0, gt=0, description="a worker that is not ready by then is replaced")
    change_roles: bool = Field(
        True, description="a worker too many in one pool takes the role that the other lacks, its weights kept"
    )
    change_grace_s: float = Field(
        10.0, ge=0, description="how long a worker that changes its role may finish what it has; the rest moves"
    )


class AutoscaleSettings(BaseModel):
    """Whether and how the pool controller changes the sizes of the pools by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    prefill_min: int = Field(1, ge=1, le=1024)
    prefill_max: int = Field(4, ge=1, le=1024)
    decode_min: int = Field(1, ge=1, le=1024)
    decode_max: int = Field(4, ge=1, le=1024)
    total_min: int = Field(0, ge=0, le=2048, description="least workers of both pools together; 0 = as their own")
    total_max: int = Field(0, ge=0, le=2048, description="most workers of both pools together; 0 = as their own")
    target_ttft_s: float = Field(2.0, gt=0, description="prefill tokens that wait should be done within it")
    target_tpot_s: float = Field(0.1, gt=0, description="a decode step should take no longer")
    up_window_s: float = Field(5.0, ge=0, description="more must be needed for so long before a pool grows")
    stable_window_s: float = Field(300.0, ge=0, description="less must be needed for so long before a pool shrinks")
    shift_window_s: float = Field(
        30.0,
        ge=0,
        description="at total_max, a pool must have had workers to spare for so long before one changes its role",
    )
    up_cooldown_s: float = Field(60.0, ge=0, description="least time from a change to the next growth")
    down_cooldown_s: float = Field(60.0, ge=0, description="least time from a change to the next shrinking")
    router_url: str = Field(
        "", description="HTTP addresses of routers that tell the load, separated by commas; pdserve up knows its own"
    )

    @model_validator(mode="after")
    def _has_ordered_limits(self) -> "AutoscaleSettings":
        if self.prefill_min > self.prefill_max or self.decode_min > self.decode_max:
            raise ValueError("a pool's min is larger than its max")
        if self.total_max and self.total_max < max(self.total_min, self.prefill_min + self.decode_min):
            raise ValueError("total_max is less than total_min, or than the pools' mins together")
        if self.total_min > self.prefill_max + self.decode_max:
            raise ValueError("total_min is more than the pools' maxes together")
        return self


class ClusterConfig(BaseModel):
    """A whole cluster: the tree that a configuration file, the environment and flags fill."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str = Field("", description="empty = start a Redis of our own (pdserve up)")
    namespace: str = Field("pdserve", pattern=r"^[A-Za-z0-9._-]{1,128}$", description="prefix of every Redis key")
    insecure: bool = Field(False, description="listen beyond loopback without TLS: the network must be trusted")
    model: ModelConfig = ModelConfig()
    tls: TlsSettings = TlsSettings()
    pools: PoolSettings = PoolSettings()
    autoscale: AutoscaleSettings = AutoscaleSettings()
    router: RouterSettings = RouterSettings()
    prefill_worker: WorkerSettings = WorkerSettings()
    decode_worker: WorkerSettings = WorkerSettings()

    @model_validator(mode="after")
    def _has_no_plain_link_by_accident(self) -> "ClusterConfig":
        for role, worker in (("prefill", self.prefill_worker), ("decode", self.decode_worker)):
            if self.tls.is_on and worker.transport == "nccl" and not worker.plain_nccl:
                raise ValueError(
                    f"{role}_worker: transport nccl does not encrypt KV, and TLS is on: set transport: gloo, "
                    "or plain_nccl: true where the network between the GPUs is trusted"
                )
        return self

    def router_config(self) -> RouterConfig:
        """What the router of this cluster needs to know."""
        shared = {"model": self.model, "redis_url": self.redis_url, "namespace": self.namespace, "tls": self.tls}
        unset = set() if self.router.router_id else {"router_id"}
        return RouterConfig(**self.router.model_dump(exclude=unset), **shared)

    def worker_config(self, role: Literal["prefill", "decode"], worker_id: str) -> WorkerConfig:
        """What one worker of this cluster needs to know."""
        settings = self.prefill_worker if role == "prefill" else self.decode_worker
        shared = {"model": self.model, "redis_url": self.redis_url, "namespace": self.namespace, "tls": self.tls}
        own = {"role": role, "worker_id": worker_id, "insecure": self.insecure}
        return WorkerConfig(**settings.model_dump(), **shared, **own)
