"""Achieved bandwidth and FLOP/s of every kernel, beside torch and over what the card showed in the same run."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from common.engine.contract.attention import AttentionBatch
from common.engine.devices.triton.chunk import gather_rows, scatter_rows
from common.engine.devices.triton.decode_attention import decode_attention
from common.engine.devices.triton.norm import add_rms_norm
from common.engine.devices.triton.prefill_attention import prefill_attention
from common.engine.devices.triton.rope_write import rope_and_write
from common.engine.devices.triton.sampling import may_draw, row_best
from common.engine.devices.triton.silu_mul import silu_mul
from common.engine.kv.cache import KVCache
from common.engine.kv.quantized import LIMITS
from tests.caches import attention_spec, fill_bytes
from tests.gpu.report import Measurement, Report

BLOCK_SIZE = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel's work: bytes or FLOPs that it cannot avoid, and the same by others."""

    name: str
    amount: float
    is_compute: bool
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the work is: FULL for a card, a tiny one to run the same code under the interpreter."""

    heads: tuple[tuple[int, int, int], ...]  # (num_heads, num_kv_heads, head_dim)
    prefill: tuple[tuple[int, int, int], ...]  # (num_seqs, cached prefix, new tokens)
    decode: tuple[tuple[int, int], ...]  # (num_seqs, seq_len)
    num_tokens: int
    hidden: int
    num_layers: int
    logits: tuple[int, int]  # (num_rows, vocab_size)
    ceiling_dim: int


FULL = Sizes(
    heads=((32, 8, 128), (9, 3, 64), (64, 8, 128)),
    prefill=((1, 0, 8192), (8, 0, 512), (4, 0, 2048), (1, 16384, 512)),
    decode=((1, 4096), (1, 32768), (32, 1024), (32, 4096), (128, 2048)),
    num_tokens=8192,
    hidden=4096,
    num_layers=8,
    logits=(64, 128_256),
    ceiling_dim=8192,
)


def measure_kernels(report: Report, sizes: Sizes = FULL, device: str = "cuda") -> None:
    """Ceilings first, then every kernel over them."""
    bandwidth, matrix_rate = ceilings(sizes.ceiling_dim, device)
    print(f"ceilings: copy {bandwidth / 1e9:.0f} GB/s, {DTYPE} matmul {matrix_rate / 1e12:.1f} TFLOP/s", flush=True)
    for work in all_work(sizes, device):
        unit, scale, ceiling = ("TFLOP/s", 1e12, matrix_rate) if work.is_compute else ("GB/s", 1e9, bandwidth)
        ours, *others = (work.amount / seconds(run, device) / scale for run in (work.ours, *work.peers.values()))
        report.measure(Measurement(work.name, unit, ours, dict(zip(work.peers, others, strict=True)), ceiling / scale))


def ceilings(dim: int, device: str) -> tuple[float, float]:
    """(bytes per second of a copy, FLOP per second of a matmul)."""
    source = torch.zeros(dim * dim * 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    square = torch.rand(dim, dim, device=device).to(DTYPE)
    copied = 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), device)
    return copied, 2 * dim**3 / seconds(lambda: square @ square, device)


def seconds(run: Callable[[], object], device: str) -> float:
    """Median time of one call on the device."""
    run()
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(20)]
    for start_mark, end_mark in marks:
        start_mark.record()
        run()
        end_mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(start_mark.elapsed_time(end_mark) for start_mark, end_mark in marks)) / 1e3


def all_work(sizes: Sizes, device: str) -> Iterator[Work]:
    for heads in sizes.heads:
        yield from (prefill_work(heads, *lengths, device) for lengths in sizes.prefill)
        for kv_dtype in (DTYPE, *LIMITS):
            yield from (decode_work(heads, *lengths, kv_dtype, device) for lengths in sizes.decode)
        yield rope_work(heads, sizes.num_tokens, device)
        yield from chunk_work(heads, sizes, device)
    yield from row_work(sizes, device)
    yield from sampling_work(sizes, device)


def paged_batch(num_seqs: int, prefix: int, new: int, device: str) -> AttentionBatch:
    """Equal sequences over blocks in random order."""
    blocks_each = -(-(prefix + new) // BLOCK_SIZE)
    tables = torch.randperm(num_seqs * blocks_each, device=device).to(torch.int32).view(num_seqs, blocks_each)
    position = torch.arange(prefix, prefix + new, device=device)
    slots = tables.long()[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    return AttentionBatch(
        positions=position.repeat(num_seqs),
        slot_mapping=slots.flatten(),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * new,
        seq_lens=torch.full((num_seqs,), prefix + new, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query_len=new,
        max_seq_len=prefix + new,
    )


def _random(*size: int, device: str) -> torch.Tensor:
    return torch.randn(size, device=device).to(DTYPE)


def _label(heads: tuple[int, int, int]) -> str:
    return "{}/{}x{}".format(*heads)


def prefill_work(heads: tuple[int, int, int], num_seqs: int, prefix: int, new: int, device: str) -> Work:
    """Torch's SDPA reads contiguous keys, without a prefix: the easier task."""
    num_heads, num_kv_heads, head_dim = heads
    batch = paged_batch(num_seqs, prefix, new, device)
    kv = _random(2, batch.block_tables.numel(), BLOCK_SIZE, num_kv_heads, head_dim, device=device).unbind()
    q = _random(num_seqs * new, num_heads, head_dim, device=device)
    query = q.view(num_seqs, new, num_heads, head_dim).transpose(1, 2).contiguous()
    key, value = (_random(num_seqs, num_kv_heads, new, head_dim, device=device) for _ in range(2))
    peers: dict[str, Callable[[], object]] = {}
    if prefix == 0:
        peers["sdpa"] = lambda: functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
    pairs = num_seqs * (new * prefix + new * (new + 1) // 2)
    name = f"prefill {_label(heads)} {num_seqs} x ({prefix}+{new})"
    scale = head_dim**-0.5
    return Work(name, 4.0 * num_heads * head_dim * pairs, True, lambda: prefill_attention(q, kv, batch, scale), peers)


def decode_work(heads: tuple[int, int, int], num_seqs: int, seq_len: int, kv_dtype: torch.dtype, device: str) -> Work:
    """Torch's SDPA reads contiguous keys of the model's type, whatever the cache's."""
    num_heads, num_kv_heads, head_dim = heads
    batch = paged_batch(num_seqs, seq_len - 1, 1, device)
    spec = attention_spec(1, num_kv_heads, head_dim, kv_dtype, BLOCK_SIZE)
    cache = KVCache(spec, (batch.block_tables.numel(),), device)
    fill_bytes(cache, 0)
    kv = cache.layers[0]
    if kv_dtype == DTYPE:
        for plane in kv:
            plane.normal_()
    q = _random(num_seqs, num_heads, head_dim, device=device)
    query = q.view(num_seqs, num_heads, 1, head_dim)
    key, value = (_random(num_seqs, num_kv_heads, seq_len, head_dim, device=device) for _ in range(2))
    num_bytes = float(num_seqs * seq_len * spec.bytes_per_token)
    name = "decode" if kv_dtype == DTYPE else f"decode_{str(kv_dtype).removeprefix('torch.')}"
    return Work(
        f"{name} {_label(heads)} {num_seqs} x {seq_len}",
        num_bytes,
        False,
        lambda: decode_attention(q, kv, batch, head_dim**-0.5),
        {"sdpa": lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)},
    )


def sampling_work(sizes: Sizes, device: str) -> Iterator[Work]:
    """The peers are torch's: a maximum, and the sort that filters would need."""
    num_rows, vocab_size = sizes.logits
    logits = torch.randn(num_rows, vocab_size, device=device)
    rows, floors = torch.arange(num_rows, device=device), torch.full((num_rows,), 3.0, device=device)
    keys = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
    num_bytes, label = 4.0 * logits.numel(), f"{num_rows} x {vocab_size}"
    with_mask = num_bytes + logits.numel()
    yield Work(f"sample_best {label}", num_bytes, False, lambda: row_best(logits), {"max": lambda: logits.max(1)})
    sort = {"sort": lambda: logits.sort(1)}
    yield Work(f"sample_filter {label}", with_mask, False, lambda: may_draw(logits, rows, floors), sort)
    noisy = (logits, rows, floors, torch.ones(num_rows, device=device), keys)
    yield Work(f"sample_draw {label}", with_mask, False, lambda: may_draw(*noisy), {})


def rope_work(heads: tuple[int, int, int], num_tokens: int, device: str) -> Work:
    num_heads, num_kv_heads, head_dim = heads
    batch = paged_batch(1, 0, num_tokens, device)
    kv = tuple(_random(2, batch.block_tables.numel(), BLOCK_SIZE, num_kv_heads, head_dim, device=device))
    q = _random(num_tokens, num_heads, head_dim, device=device)
    k, v = (_random(num_tokens, num_kv_heads, head_dim, device=device) for _ in range(2))
    cos_sin = torch.rand(num_tokens, head_dim, device=device)
    num_bytes = 2.0 * (q.numel() + k.numel() + v.numel()) * DTYPE.itemsize + 4.0 * cos_sin.numel()
    return Work(
        f"rope_and_write {_label(heads)} {num_tokens}",
        num_bytes,
        False,
        lambda: rope_and_write(q, k, v, cos_sin, batch.positions, kv, batch.slot_mapping),
        {},
    )


def chunk_work(heads: tuple[int, int, int], sizes: Sizes, device: str) -> Iterator[Work]:
    """One plane. The peer is torch's indexing."""
    _, num_kv_heads, head_dim = heads
    row = num_kv_heads * head_dim
    num_tokens = sizes.num_tokens
    num_slots = -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE
    numbers = _random(sizes.num_layers, num_slots, row, device=device)
    slots = torch.randperm(num_slots, device=device)[:num_tokens]
    copied = torch.empty((sizes.num_layers, num_tokens, row), dtype=DTYPE, device=device)
    plane, part = numbers.view(torch.uint8), copied.view(torch.uint8)
    columns = slice(0, plane.shape[2])
    gather = {"index_select": lambda: torch.index_select(numbers, 1, slots, out=copied)}
    scatter = {"index_copy": lambda: numbers.index_copy_(1, slots, copied)}
    num_bytes = 2.0 * part.numel()
    name = f"{_label(heads)} {sizes.num_layers} layers x {num_tokens}"
    yield Work(f"pack {name}", num_bytes, False, lambda: gather_rows(plane, slots, columns, part), gather)
    yield Work(f"unpack {name}", num_bytes, False, lambda: scatter_rows(plane, slots, columns, part), scatter)


def row_work(sizes: Sizes, device: str) -> Iterator[Work]:
    """The peer is torch, one operator after another."""
    x, residual = (_random(sizes.num_tokens, sizes.hidden, device=device) for _ in range(2))
    weight = _random(sizes.hidden, device=device)
    label = f"{sizes.num_tokens} x {sizes.hidden}"
    num_bytes = float(x.numel() * DTYPE.itemsize)
    yield Work(
        f"add_rms_norm {label}",
        4 * num_bytes,
        False,
        lambda: add_rms_norm(x, residual, weight, 1e-5),
        {"torch": lambda: functional.rms_norm(x + residual, (sizes.hidden,), weight, 1e-5)},
    )
    eager = {"torch": lambda: functional.silu(x) * residual}
    yield Work(f"silu_mul {label}", 3 * num_bytes, False, lambda: silu_mul(x, residual), eager)
