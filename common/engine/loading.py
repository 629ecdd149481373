"""From a worker's configuration to a model that is ready to run."""

import ctypes
import gc
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch

from common.checkpoint import Checkpoint, CheckpointError, ModelSpec, open_checkpoint
from common.engine.contract.attention import AttentionBackend
from common.engine.contract.elementwise import Elementwise
from common.engine.contract.progress import LoadPhase, Progress, no_progress
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.devices.cpu.native_backend import NativeBackend
from common.engine.devices.cpu.torch_backend import CpuBackend
from common.engine.executor.graphs import DecodeGraphs
from common.engine.executor.runner import ModelRunner
from common.engine.executor.self_test import self_test
from common.engine.kv.cache import KVCache, KVShape, num_blocks_that_fit
from common.engine.kv.quantized import is_quantized
from common.engine.model.decoder import Decoder, build_decoder
from common.engine.model.weights import open_weights
from common.engine.sampling import DrawCandidates
from common.values.config import Attention, Dtype, KVCacheDtype, Quantization, WorkerConfig
from common.values.request import Fingerprint

PROTOCOL_VERSION = "2"  # of the handoff: the order and layout of what is sent
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device. `fingerprint` is what must be equal before two workers exchange KV."""

    model: Decoder
    draws: DrawCandidates | None  # what narrows draws down on the device
    runner: ModelRunner
    cache: KVCache
    spec: ModelSpec
    dtype: torch.dtype
    device: str
    served_name: str
    max_model_len: int
    fingerprint: Fingerprint


def load_model(config: WorkerConfig, progress: Progress = no_progress) -> LoadedModel:
    """Read the weights, allocate the KV cache, try both. Sets the process's torch threads. Raises CheckpointError."""
    attention = resolve_attention(config.attention)
    device = "cuda" if attention == "triton" and torch.cuda.is_available() else "cpu"
    _prepare_process(config.num_threads)
    progress(LoadPhase.CHECKPOINT, 0.0)
    checkpoint = open_checkpoint(config.model.path)
    spec = checkpoint.config
    dtype = resolve_dtype(config.dtype, device)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype)
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype)
    progress(LoadPhase.CACHE, 0.0)
    cache = _new_cache(config, shape, device)
    progress(LoadPhase.KERNELS, 0.0)
    ops = native_ops() if attention == "cpu" else None
    # the compiled attention knows neither windows, soft caps nor quantized rows
    is_plain = spec.has_plain_attention and not is_quantized(kv_dtype)
    backend = _triton(cache, spec, dtype) if attention == "triton" else _cpu_backend(ops if is_plain else None)
    weights = open_weights(checkpoint, dtype, device, partial(progress, LoadPhase.WEIGHTS))
    elementwise = _elementwise(attention, ops)
    model = build_decoder(spec, weights, backend, device, elementwise, _products(ops, config.quantization, dtype))
    draws = _draws(attention, ops)
    runner = _new_runner(config, model, cache, draws, _max_model_len(config, spec, cache))
    progress(LoadPhase.SELF_TEST, 0.0)
    self_test(runner)
    return LoadedModel(
        model=model,
        draws=draws,
        runner=runner,
        cache=cache,
        spec=spec,
        dtype=dtype,
        device=device,
        served_name=config.model.served_name or checkpoint.served_name,
        max_model_len=_max_model_len(config, spec, cache),
        fingerprint=fingerprint_of(checkpoint, dtype, kv_dtype, config.quantization),
    )


def refit(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """The same weights for another role, with a KV cache of its size. Nobody may use the old cache any more.

    Memory of the right size is kept, else it is given back first: two caches need not fit.
    """
    cache = loaded.cache
    num_blocks = _num_blocks(config, cache.shape)
    if (num_blocks, config.block_size) != (cache.num_blocks, cache.block_size):
        cache.free()
        gc.collect()  # the ended role is a web of callbacks: what it holds besides, as CUDA graphs, goes with it
        cache = KVCache(cache.shape, num_blocks, config.block_size, loaded.device)
    max_model_len = _max_model_len(config, loaded.spec, cache)
    runner = _new_runner(config, loaded.model, cache, loaded.draws, max_model_len)
    return replace(loaded, runner=runner, cache=cache, max_model_len=max_model_len)


def _new_runner(
    config: WorkerConfig, model: Decoder, cache: KVCache, draws: DrawCandidates | None, max_len: int
) -> ModelRunner:
    has_graphs = config.cuda_graphs and cache.data.is_cuda
    graphs = DecodeGraphs(model, cache, config.max_num_seqs, max_len) if has_graphs else None
    return ModelRunner(model, cache, cache.data.device, draws, graphs)


def _new_cache(config: WorkerConfig, shape: KVShape, device: str) -> KVCache:
    return KVCache(shape, _num_blocks(config, shape), config.block_size, device)


def _num_blocks(config: WorkerConfig, shape: KVShape) -> int:
    return config.num_blocks or num_blocks_that_fit(config.kv_cache_bytes, shape, config.block_size)


def _max_model_len(config: WorkerConfig, spec: ModelSpec, cache: KVCache) -> int:
    return min(config.model.max_model_len or spec.max_position, spec.max_position, cache.num_slots)


def fingerprint_of(
    checkpoint: Checkpoint, dtype: torch.dtype, kv_cache_dtype: torch.dtype, quantization: Quantization = "none"
) -> Fingerprint:
    """Everything that decides what a token's KV means."""
    spec = checkpoint.config
    fields = {
        "model": checkpoint.digest,
        "tokenizer": checkpoint.tokenizer_digest,
        "architecture": spec.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
        "kv_cache_dtype": str(kv_cache_dtype).removeprefix("torch."),
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "protocol": PROTOCOL_VERSION,
    }
    return Fingerprint(tuple((name, str(value)) for name, value in fields.items()))


def resolve_dtype(dtype: Dtype, device: str) -> torch.dtype:
    """auto = bfloat16 where it is computed in hardware, else float32."""
    if dtype == "auto":
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = device == "cuda" or capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
        return torch.bfloat16 if has_bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def resolve_kv_cache_dtype(kv_cache_dtype: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """auto = that of the model."""
    return {"auto": dtype, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[kv_cache_dtype]


def resolve_attention(attention: Attention) -> Attention:
    """auto = triton on a GPU, else cpu."""
    if attention == "auto":
        return "triton" if torch.cuda.is_available() else "cpu"
    return attention


def _products(ops: NativeOps | None, quantization: Quantization, dtype: torch.dtype) -> NativeProducts | None:
    """What weights are packed for. Raises CheckpointError where fewer bits were asked for and cannot be had."""
    products = ops.products if ops is not None else None
    if quantization == "none":
        return products
    if products is None or dtype != torch.bfloat16:
        raise CheckpointError(
            f"quantization={quantization} needs bfloat16 on a CPU with AVX512-BF16, and a C++ compiler"
        )
    return products.with_bits({"int8": 8, "int4": 4}[quantization])


def _elementwise(attention: Attention, ops: NativeOps | None) -> Elementwise | None:
    if attention == "triton":
        from common.engine.devices.triton.elementwise import TritonElementwise  # imports triton

        return TritonElementwise()
    return ops


def _draws(attention: Attention, ops: NativeOps | None) -> DrawCandidates | None:
    if attention == "triton":
        from common.engine.devices.triton.device_draws import TritonDraws  # imports triton

        return TritonDraws()
    return ops


def _cpu_backend(ops: NativeOps | None) -> AttentionBackend:
    return NativeBackend(ops) if ops is not None else CpuBackend()


def _triton(cache: KVCache, spec: ModelSpec, dtype: torch.dtype) -> AttentionBackend:
    from common.engine.devices.triton.backend import TritonBackend  # imports triton, which the cpu path does without
    from common.engine.devices.triton.tuning import TuningFile, tune_attention

    if not cache.data.is_cuda:
        return TritonBackend()
    file = TuningFile.of_device(torch.cuda.get_device_name())
    return TritonBackend(tune_attention(file, cache.layers[0], spec.num_heads, spec.head_dim, dtype))


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
