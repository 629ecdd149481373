"""From a worker's configuration to a model that is ready to run."""

import ctypes
import gc
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch

from common.checkpoint import Checkpoint, CheckpointError, ModelSpec, open_checkpoint
from common.checkpoint.families import layers_of
from common.engine.contract.device import Device
from common.engine.contract.kv_spec import KVGroup, KVSpec
from common.engine.contract.progress import LoadPhase, Progress, no_progress
from common.engine.devices.cpu.device import CpuDevice, cpu_dtype
from common.engine.devices.cpu.native.dequantize import dequantize
from common.engine.executor.graphs import DecodeGraphs
from common.engine.executor.runner import ModelRunner
from common.engine.executor.self_test import self_test
from common.engine.kv.attention_planes import attention_planes
from common.engine.kv.cache import KVCache
from common.engine.kv.sizing import Demand, longest_sequence, num_blocks_asked_for, num_blocks_that_fit
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.weights import open_weights
from common.engine.sampling.guided import GuidedRows
from common.guided.masks import GrammarFailed, Masks, guided_tokenizer
from common.telemetry.logs import get_logger
from common.values.config import KVCacheDtype, Quantization, WorkerConfig
from common.values.request import Fingerprint

PROTOCOL_VERSION = "3"  # of the handoff: the order and layout of what is sent
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device. `fingerprint` is what must be equal before two workers exchange KV."""

    device: Device
    guided: GuidedRows
    model: Decoder
    runner: ModelRunner
    cache: KVCache
    spec: ModelSpec
    served_name: str
    max_model_len: int
    fingerprint: Fingerprint


def load_model(config: WorkerConfig, progress: Progress = no_progress) -> LoadedModel:
    """Read the weights, allocate the KV cache, try both. Sets the process's torch threads. Raises CheckpointError."""
    _prepare_process(config.num_threads)
    progress(LoadPhase.CHECKPOINT, 0.0)
    checkpoint = _open_for_length(config)
    spec = checkpoint.config
    progress(LoadPhase.KERNELS, 0.0)
    device = open_device(config)
    if checkpoint.stored_as is not None:
        dtype = str(device.dtype).removeprefix("torch.")
        get_logger().info("weights_are_dequantized", stored_as=checkpoint.stored_as, dtype=dtype)
    progress(LoadPhase.CACHE, 0.0)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, device.dtype)
    kv_spec = kv_spec_of(spec, kv_dtype, config.block_size)
    cache = _new_cache(kv_spec, _num_blocks(config, spec, kv_spec), device)
    on_taken = partial(progress, LoadPhase.WEIGHTS)
    weights = open_weights(checkpoint, device.dtype, device.place, on_taken, dequantize)
    model = build_decoder(spec, weights, device)
    max_model_len = _max_model_len(config, spec, cache)
    guided = GuidedRows(partial(_open_masks, checkpoint))
    runner = _new_runner(config, model, cache, device, max_model_len, guided)
    progress(LoadPhase.SELF_TEST, 0.0)
    device.tune(cache.layers[0], spec.num_heads, spec.head_dim)
    self_test(runner, len(kv_spec.groups))
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
    )


def open_device(config: WorkerConfig) -> Device:
    """The one choice between CPU and GPU: attention auto = triton where torch sees a GPU, else cpu.

    Raises CheckpointError where it cannot hold weights as configured, RuntimeError where it cannot run at all.
    """
    has_gpu = torch.cuda.is_available()
    if config.attention == "triton" or (config.attention == "auto" and has_gpu):
        from common.engine.devices.triton.device import TritonDevice  # imports triton, which a CPU does without

        is_auto = has_gpu and config.dtype == "auto"
        return TritonDevice(torch.bfloat16 if is_auto else cpu_dtype(config.dtype), config.quantization)
    return CpuDevice.open(config.dtype, config.quantization)


def refit(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """The same weights for another role, with a KV cache of its size. The old cache may not be used any more.

    Memory of the right size is kept, else it is given back first: two caches need not fit.
    """
    cache = loaded.cache
    kv_spec = replace(cache.spec, block_size=config.block_size)
    num_blocks = _num_blocks(config, loaded.spec, kv_spec)
    if (num_blocks, kv_spec) != (cache.num_blocks, cache.spec):
        cache.free()
        gc.collect()  # the ended role is a web of callbacks: what it holds besides, as CUDA graphs, goes with it
        cache = _new_cache(kv_spec, num_blocks, loaded.device)
    max_model_len = _max_model_len(config, loaded.spec, cache)
    runner = _new_runner(config, loaded.model, cache, loaded.device, max_model_len, loaded.guided)
    return replace(loaded, runner=runner, cache=cache, max_model_len=max_model_len)


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
    config: WorkerConfig, model: Decoder, cache: KVCache, device: Device, max_len: int, guided: GuidedRows
) -> ModelRunner:
    capture = device.new_capture() if config.cuda_graphs else None
    graphs = DecodeGraphs(model, cache, config.max_num_seqs, max_len, capture) if capture is not None else None
    return ModelRunner(model, cache, device, graphs, guided=guided)


def kv_spec_of(spec: ModelSpec, kv_dtype: torch.dtype, block_size: int) -> KVSpec:
    """What a token of a model leaves behind: a group for each window, the one that sees all tokens first.

    Raises ValueError where heads cannot be stored as codes.
    """
    layers_by_window: dict[int, list[int]] = {}
    for number, layer in enumerate(layers_of(spec)):
        layers_by_window.setdefault(layer.attention.window, []).append(number)
    planes = attention_planes(spec.num_kv_heads, spec.head_dim, kv_dtype)
    groups = (KVGroup(tuple(layers), planes, window) for window, layers in sorted(layers_by_window.items()))
    return KVSpec(block_size, tuple(groups))


def _new_cache(kv_spec: KVSpec, num_blocks: tuple[int, ...], device: Device) -> KVCache:
    cache = KVCache(kv_spec, num_blocks, device.place)
    for group, count in zip(kv_spec.groups, num_blocks, strict=True):
        sizes = {"num_blocks": count, "num_bytes": count * kv_spec.block_size * group.bytes_per_token}
        get_logger().info("kv_cache", group=str(group), bytes_per_token=group.bytes_per_token, **sizes)
    return cache


def _num_blocks(config: WorkerConfig, spec: ModelSpec, kv_spec: KVSpec) -> tuple[int, ...]:
    demand = Demand(_max_len(config, spec), config.max_num_seqs, config.max_num_batched_tokens)
    if config.num_blocks:
        return num_blocks_asked_for(config.num_blocks, kv_spec, demand)
    return num_blocks_that_fit(config.kv_cache_bytes, kv_spec, demand)


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


def _prepare_process(num_threads: int) -> None:
    """Set the threads, and keep freed activations in the heap: by default glibc hands large ones back to the kernel
    after every operator and pays page faults for the next (a KV gather took 2.3 ms instead of 0.3, 2026-11).
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
