"""From a worker's configuration to a model that is ready to run."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from common.checkpoint import Checkpoint, CheckpointError, ModelSpec, open_checkpoint
from common.checkpoint.families import layers_of
from common.engine.contract.collectives import Collectives
from common.engine.contract.device import Device
from common.engine.contract.executor import Runner
from common.engine.contract.kv_spec import KVGroup, KVSpec
from common.engine.contract.progress import LoadPhase, Progress, no_progress
from common.engine.devices.cpu.device import CpuDevice, cpu_dtype
from common.engine.devices.cpu.native.dequantize import dequantize
from common.engine.devices.hidden_gpu import refuse_hidden_gpu
from common.engine.executor.adapters import Adapters
from common.engine.executor.graphs import DecodeGraphs
from common.engine.executor.ranks import RankedRunner, RankProcesses
from common.engine.executor.runner import ModelRunner
from common.engine.executor.self_test import self_test
from common.engine.kv.cache import KVCache
from common.engine.kv.latent_planes import planes_of
from common.engine.kv.memory import check_weights_fit, largest_step, room_for_cache
from common.engine.kv.sharded import KVShards, new_shards
from common.engine.kv.sizing import Demand, longest_sequence, num_blocks_asked_for, num_blocks_that_fit
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.sharding import check_split, cuts_of
from common.engine.model.weights import open_weights
from common.engine.sampling.guided import GuidedRows
from common.guided.masks import GrammarFailed, Masks, guided_tokenizer
from common.telemetry.logs import get_logger
from common.values.config import CPU_CACHE_BYTES, KVCacheDtype, Quantization, WorkerConfig
from common.values.ranks import Rank, ranks_of
from common.values.request import Fingerprint

PROTOCOL_VERSION = "3"  # of the handoff: the order and layout of what is sent
MAX_SUMMED_AT_ONCE = 1 << 20  # numbers
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device. `fingerprint` is what must be equal before two workers exchange KV."""

    device: Device
    guided: GuidedRows
    model: Decoder
    runner: Runner
    cache: KVCache  # of rank 0
    spec: ModelSpec
    served_name: str
    max_model_len: int
    fingerprint: Fingerprint
    adapters: Adapters
    cache_bytes: int = CPU_CACHE_BYTES  # what a role has for KV that does not state it
    shards: KVShards | None = None  # the caches of all ranks, if there are several
    others: RankProcesses | None = None  # the ranks besides this process, if there are any

    @property
    def handoff_cache(self) -> "KVCache | KVShards":
        """All of the model's KV."""
        return self.shards or self.cache

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes that run the model together, this one first."""
        return (os.getpid(), *(self.others.pids if self.others is not None else ()))

    @property
    def ranks_silent_s(self) -> tuple[float, ...]:
        """For how long nothing was heard of each rank, this one too; () if there is only this one."""
        return (0.0, *self.others.silent_s) if self.others is not None else ()

    def close(self) -> None:
        """End the processes of the other ranks."""
        if self.others is not None:
            self.others.close()


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank other than 0 has of a model. `kv_spec` is that of the whole model."""

    device: Device
    model: Decoder
    kv_spec: KVSpec
    rank: Rank

    def new_runner(self, block_size: int, num_blocks: tuple[int, ...], memory: torch.Tensor) -> ModelRunner:
        """Over an empty cache in `memory` (1-D uint8)."""
        spec = replace(self.kv_spec, block_size=block_size).of_rank(self.rank)
        return ModelRunner(self.model, KVCache(spec, num_blocks, shared=memory), self.device, rank=self.rank)


def load_model(config: WorkerConfig, progress: Progress = no_progress) -> LoadedModel:
    """Read the weights, allocate the KV cache, try both. Sets the process's torch threads. Raises CheckpointError.

    With several ranks this is rank 0; the others load in processes of their own at the same time.
    """
    _prepare_process(config)
    progress(LoadPhase.CHECKPOINT, 0.0)
    checkpoint = _open_for_length(config)
    if config.tensor_parallel_size == 1:
        return _load(config, checkpoint, progress, None)
    check_split(checkpoint.config, config.tensor_parallel_size)
    others = RankProcesses(config, _slot_bytes(config, checkpoint.config))
    try:
        return _load(config, checkpoint, progress, others)
    except BaseException:
        others.close()
        raise


def load_part(config: WorkerConfig, collectives: Collectives) -> RankPart:
    """What a rank other than 0 loads. Sets the process's torch threads. Raises CheckpointError."""
    _prepare_process(config)
    checkpoint = _open_for_length(config)
    device = open_device(config)
    model = _read_model(checkpoint, device, collectives)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, device.dtype)
    return RankPart(device, model, kv_spec_of(checkpoint.config, kv_dtype, config.block_size), collectives.rank)


def _load(
    config: WorkerConfig, checkpoint: Checkpoint, progress: Progress, others: RankProcesses | None
) -> LoadedModel:
    spec = checkpoint.config
    progress(LoadPhase.KERNELS, 0.0)
    device = open_device(config)
    if checkpoint.stored_as is not None:
        dtype = str(device.dtype).removeprefix("torch.")
        get_logger().info("weights_are_dequantized", stored_as=checkpoint.stored_as, dtype=dtype)
    if device.memory is not None:
        check_weights_fit(checkpoint, device.dtype, device.memory, config.gpu_memory_utilization)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, device.dtype)
    kv_spec = kv_spec_of(spec, kv_dtype, config.block_size)
    shards = None
    collectives = others.collectives if others is not None else None
    model = _read_model(checkpoint, device, collectives, partial(progress, LoadPhase.WEIGHTS))
    progress(LoadPhase.CACHE, 0.0)
    config = config.model_copy(update={"kv_cache_bytes": _cache_bytes(config, model, device, spec, kv_spec)})
    if others is None:
        cache = _new_cache(kv_spec, _num_blocks(config, spec, kv_spec), device)
    else:
        others.wait_until_loaded()
        shards = _new_shards(config, spec, kv_spec, others)
        cache = shards.caches[0]
    get_logger().info("layers_prepared", num_layers=spec.num_layers, num_compiled=len(model.compiled_layers))
    max_model_len = _max_model_len(config, spec, cache)
    guided = GuidedRows(partial(_open_masks, checkpoint))
    adapters = Adapters(spec, device.dtype, device.place)
    runner = _new_runner(config, model, cache, device, max_model_len, guided, adapters, others)
    progress(LoadPhase.SELF_TEST, 0.0)
    device.tune(cache.layers[0], spec.num_heads, spec.head_dim)
    self_test(runner, len(kv_spec.groups))
    _warm_up(runner)
    return LoadedModel(
        device=device,
        guided=guided,
        model=model,
        runner=runner,
        cache=cache,
        spec=spec,
        served_name=config.model.served_name or checkpoint.served_name,
        max_model_len=max_model_len,
        fingerprint=fingerprint_of(checkpoint, device.dtype, kv_spec, config.quantization),
        adapters=adapters,
        cache_bytes=CPU_CACHE_BYTES if device.memory is None else config.kv_cache_bytes,
        shards=shards,
        others=others,
    )


def _cache_bytes(config: WorkerConfig, model: Decoder, device: Device, spec: ModelSpec, kv_spec: KVSpec) -> int:
    """What is configured, else what is left of the device's memory. Raises CheckpointError when nothing is."""
    if config.kv_cache_bytes or config.num_blocks or device.memory is None:
        return config.kv_cache_bytes or CPU_CACHE_BYTES
    sizes = config.max_num_seqs, config.max_num_batched_tokens, _max_len(config, spec), config.block_size
    plan = largest_step(*sizes, len(kv_spec.groups))
    num_blocks = (len(plan.sequences[0].block_tables[0]),) * len(kv_spec.groups)
    runner = ModelRunner(model, KVCache(kv_spec, num_blocks, device.place), device)
    peak_bytes = device.memory.peak_of(lambda: runner.run(plan))
    num_bytes = room_for_cache(device.memory, config.gpu_memory_utilization, peak_bytes)
    get_logger().info("kv_cache_sized", peak_bytes=peak_bytes, total=device.memory.total(), num_bytes=num_bytes)
    return num_bytes


def _read_model(
    checkpoint: Checkpoint,
    device: Device,
    collectives: Collectives | None,
    on_taken: Callable[[float], None] | None = None,
) -> Decoder:
    """All of it, or a rank's part. Raises CheckpointError."""
    if collectives is None:
        weights = open_weights(checkpoint, device.dtype, device.place, on_taken, dequantize)
        return build_decoder(checkpoint.config, weights, device)
    if device.place.type != "cpu":
        raise CheckpointError("tensor_parallel_size > 1 computes on CPUs only: set attention to cpu, or the size to 1")
    cuts = cuts_of(checkpoint.config, collectives.rank)
    weights = open_weights(checkpoint, device.dtype, device.place, on_taken, dequantize, cuts)
    return build_decoder(checkpoint.config, weights, device, collectives)


def _slot_bytes(config: WorkerConfig, spec: ModelSpec) -> int:
    """What ranks write at once: a step's activations, within reason, and a row of logits at least."""
    activations = min(config.max_num_batched_tokens * spec.hidden_size, MAX_SUMMED_AT_ONCE)
    return max(activations, -(-spec.vocab_size // config.tensor_parallel_size)) * torch.float32.itemsize


def _new_shards(config: WorkerConfig, spec: ModelSpec, kv_spec: KVSpec, others: RankProcesses) -> KVShards:
    """Every rank's cache, in memory that this process sees too, handed to the other ranks."""
    num_blocks = _num_blocks(config, spec, kv_spec)
    shards, fds = new_shards(kv_spec, num_blocks, ranks_of(config.tensor_parallel_size))
    try:
        others.use_caches(kv_spec.block_size, num_blocks, fds[1:])
    finally:
        for fd in fds:
            os.close(fd)
    return shards


def open_device(config: WorkerConfig) -> Device:
    """The one choice between CPU and GPU: attention auto = triton where torch sees a GPU, else cpu.

    Raises CheckpointError where it cannot hold weights as configured, RuntimeError where it cannot run at all.
    """
    has_gpu = torch.cuda.is_available()
    if config.attention == "auto" and not has_gpu:
        refuse_hidden_gpu()
    if config.attention == "triton" or (config.attention == "auto" and has_gpu):
        from common.engine.devices.triton.device import TritonDevice  # imports triton, which a CPU does without

        is_auto = has_gpu and config.dtype == "auto"
        return TritonDevice(torch.bfloat16 if is_auto else cpu_dtype(config.dtype), config.quantization)
    return CpuDevice.open(config.dtype, config.quantization)


def refit(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """The same weights for another role, with a KV cache of its size. The old cache may not be used any more.

    Memory of the right size is kept, else it is given back first: two caches need not fit.
    """
    old, others, shards = loaded.handoff_cache, loaded.others, loaded.shards
    config = config.model_copy(update={"kv_cache_bytes": config.kv_cache_bytes or loaded.cache_bytes})
    cache = loaded.cache
    kv_spec = replace(old.spec, block_size=config.block_size)
    num_blocks = _num_blocks(config, loaded.spec, kv_spec)
    if (num_blocks, kv_spec) != (cache.num_blocks, old.spec):
        old.free()
        gc.collect()  # the ended role is a web of callbacks: what it holds besides, as CUDA graphs, goes with it
        if others is None:
            cache = _new_cache(kv_spec, num_blocks, loaded.device)
        else:
            shards = _new_shards(config, loaded.spec, kv_spec, others)
            cache = shards.caches[0]
    max_model_len = _max_model_len(config, loaded.spec, cache)
    runner = _new_runner(
        config, loaded.model, cache, loaded.device, max_model_len, loaded.guided, loaded.adapters, others
    )
    _warm_up(runner)
    return replace(loaded, runner=runner, cache=cache, shards=shards, max_model_len=max_model_len)


def _open_for_length(config: WorkerConfig) -> Checkpoint:
    checkpoint = open_checkpoint(config.model.path)
    return replace(checkpoint, config=checkpoint.config.for_length(_max_len(config, checkpoint.config)))


def _open_masks(checkpoint: Checkpoint) -> Masks:
    """Raises GrammarFailed where the model has no tokenizer that can be read."""
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:
        raise GrammarFailed(str(error)) from error
    return Masks(guided_tokenizer(tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids))


def _new_runner(
    config: WorkerConfig,
    model: Decoder,
    cache: KVCache,
    device: Device,
    max_len: int,
    guided: GuidedRows,
    adapters: Adapters,
    others: RankProcesses | None,
) -> Runner:
    if others is not None:
        return RankedRunner(ModelRunner(model, cache, device, None, others.collectives.rank, guided), others)
    capture = device.new_capture() if config.cuda_graphs and model.is_recordable else None
    graphs = DecodeGraphs(model, cache, config.max_num_seqs, max_len, capture) if capture is not None else None
    return ModelRunner(model, cache, device, graphs, guided=guided, adapters=adapters)


def _warm_up(runner: Runner) -> None:
    if isinstance(runner, ModelRunner):
        runner.warm_up()


def kv_spec_of(spec: ModelSpec, kv_dtype: torch.dtype, block_size: int) -> KVSpec:
    """What a token of a model leaves behind: a group for each window, the one that sees all tokens first.

    Raises ValueError where heads, or latents, cannot be stored as codes.
    """
    layers_by_window: dict[int, list[int]] = {}
    layers = layers_of(spec)
    for number, layer in enumerate(layers):
        layers_by_window.setdefault(layer.attention.window, []).append(number)
    planes = planes_of(layers[0], kv_dtype)
    groups = (KVGroup(tuple(numbers), planes, window) for window, numbers in sorted(layers_by_window.items()))
    return KVSpec(block_size, tuple(groups))


def _new_cache(kv_spec: KVSpec, num_blocks: tuple[int, ...], device: Device) -> KVCache:
    cache = KVCache(kv_spec, num_blocks, device.place)
    for group, count in zip(kv_spec.groups, num_blocks, strict=True):
        sizes = {"num_blocks": count, "num_bytes": count * kv_spec.block_size * group.bytes_per_token}
        get_logger().info("kv_cache", group=str(group), bytes_per_token=group.bytes_per_token, **sizes)
    return cache


def _num_blocks(config: WorkerConfig, spec: ModelSpec, kv_spec: KVSpec) -> tuple[int, ...]:
    """`kv_spec` is the whole model's; the rank that holds most of it has to have room."""
    demand = Demand(_max_len(config, spec), config.max_num_seqs, config.max_num_batched_tokens)
    held = [kv_spec.of_rank(rank) for rank in ranks_of(config.tensor_parallel_size)]
    most = max(held, key=lambda spec: spec.bytes_per_token)
    if config.num_blocks:
        return num_blocks_asked_for(config.num_blocks, most, demand)
    return num_blocks_that_fit(config.kv_cache_bytes, most, demand)


def _max_model_len(config: WorkerConfig, spec: ModelSpec, cache: KVCache) -> int:
    return longest_sequence(cache.spec, cache.num_blocks, _max_len(config, spec))


def _max_len(config: WorkerConfig, spec: ModelSpec) -> int:
    return min(config.model.max_model_len or spec.max_position, spec.max_position)


def fingerprint_of(
    checkpoint: Checkpoint, dtype: torch.dtype, kv_spec: KVSpec, quantization: Quantization = "none"
) -> Fingerprint:
    """Everything that decides what a token's KV means."""
    spec = checkpoint.config
    fields = {
        "model": checkpoint.digest,
        "tokenizer": checkpoint.tokenizer_digest,
        "architecture": spec.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
        "kv_cache": "; ".join(map(str, kv_spec.groups)),
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "protocol": PROTOCOL_VERSION,
    }
    return Fingerprint(tuple((name, str(value)) for name, value in fields.items()))


def resolve_kv_cache_dtype(kv_cache_dtype: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """auto = that of the model."""
    return {"auto": dtype, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[kv_cache_dtype]


def _prepare_process(config: WorkerConfig) -> None:
    """Set the threads, and keep freed activations in the heap: by default glibc hands large ones back to the kernel
    after every operator and pays page faults for the next (a KV gather took 2.3 ms instead of 0.3, 2026-11).
    """
    if num_threads := _num_threads(config):
        torch.set_num_threads(num_threads)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _num_threads(config: WorkerConfig) -> int:
    """Of one rank; 0 = torch's choice. Ranks share a worker's threads: more than cores would wait for each other."""
    if config.tensor_parallel_size == 1:
        return config.num_threads
    return max(1, (config.num_threads or os.cpu_count() or 1) // config.tensor_parallel_size)
