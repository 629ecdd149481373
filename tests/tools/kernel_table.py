"""Table of all kernels compiled ahead of time: registers, shared memory, spills, load widths, matrix instructions.

`python -m tests.tools.kernel_table [--target sm_90] [--case prefill]`: exit code 1 if a kernel spills, loads its data
narrowly, or has no matrix instruction where a dot is. Needs no GPU. The interpreter must be off.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.engine.devices.triton.chunk import gather_rows, scatter_rows
from common.engine.devices.triton.decode_attention import decode_attention, decode_candidates
from common.engine.devices.triton.grouped_product import grouped_product, sort_pairs
from common.engine.devices.triton.latent_attention import latent_decode_attention, latent_prefill_attention
from common.engine.devices.triton.latent_write import rope_and_write_latent
from common.engine.devices.triton.norm import add_rms_norm, rms_norm
from common.engine.devices.triton.prefill_attention import prefill_attention, prefill_candidates
from common.engine.devices.triton.rope_write import rope_and_write
from common.engine.devices.triton.sampling import adjust_logits, may_draw, row_best
from common.engine.devices.triton.silu_mul import silu_mul
from tests.common.engine.devices.triton.cases import Shape, attention_case
from tests.common.engine.devices.triton.latent_checks import latent_case
from tests.tools.kernel_compile import TARGETS, Facts, compile_launches

# Bytes of shared memory that one program may have.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Matrix instruction of a tile of 64 rows and more, and of the few rows of a decode step: wgmma and tcgen05 have no
# shape below 64 rows, and decode waits for memory, not for products.
WIDE_MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
NARROW_MATRIX = {"sm_80": "mma.sync", "sm_90": "mma.sync", "sm_100": "mma.sync", "gfx942": "v_mfma"}
# Float32 is multiplied exactly, not as tf32: no matrix instruction of NVIDIA does that.
EXACT_MATRIX = {"sm_80": "", "sm_90": "", "sm_100": "", "gfx942": "v_mfma"}
NO_MATRIX = dict.fromkeys(TARGETS, "")

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    """One launch to compile, and the matrix instruction that its dot must become."""

    name: str
    run: Callable[[], Any]
    matrix: dict[str, str]


def cases() -> list[Case]:
    return [
        *_attention_cases(),
        *_quantized_cases(),
        *_tuned_cases(),
        *_other_cases(),
        *_latent_cases(),
        *_grouped_cases(),
        *_sampling_cases(),
    ]


def _attention_cases() -> Iterator[Case]:
    variants: list[tuple[str, int, str, dict[str, Any]]] = [
        *((f"{dtype} d{dim}", dim, dtype, {}) for dtype in ("bf16", "fp32") for dim in (64, 80, 96, 128, 256)),
        ("fp16 d128", 128, "fp16", {}),
        ("bf16 d128 window", 128, "bf16", {"window": 4096}),
        ("bf16 d64 window sinks", 64, "bf16", {"window": 128, "sinks": torch.zeros(32)}),
        ("bf16 d256 window cap", 256, "bf16", {"window": 4096, "soft_cap": 50.0}),
    ]
    for label, head_dim, dtype, options in variants:
        shape = Shape(head_dim=head_dim, num_kv_heads=8, group=4, dtype=DTYPES[dtype])
        yield from _attention_case(label, shape, options)


def _attention_case(label: str, shape: Shape, options: dict[str, Any]) -> Iterator[Case]:
    for kernel, name, lengths, matrix in (
        (prefill_attention, "prefill", ((600, 600),), WIDE_MATRIX),
        (prefill_attention, "prefill short", ((600, 16),), WIDE_MATRIX),
        (decode_attention, "decode", ((600, 1),), NARROW_MATRIX),
    ):
        wanted = EXACT_MATRIX if shape.dtype == torch.float32 else matrix
        yield Case(f"{name} {label}", partial(_attend, kernel, lengths, shape, options), wanted)


def _tuned_cases() -> Iterator[Case]:
    """What tuning tries besides the rule: number 1 of prefill's is persistent."""
    for head_dim, kv_dtype in itertools.product((64, 128, 256), (None, torch.int8)):
        label = f"{'bf16' if kv_dtype is None else 'bf16/int8'} {head_dim}"
        shape = Shape(head_dim, num_kv_heads=8, group=4, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        for idx in (1, 2):
            yield Case(f"prefill tuned {idx} {label}", partial(_attend_tuned, shape, idx, "prefill"), WIDE_MATRIX)
        for idx in range(1, len(decode_candidates(head_dim, torch.bfloat16, int(kv_dtype is not None)))):
            yield Case(f"decode tuned {idx} {label}", partial(_attend_tuned, shape, idx, "decode"), NARROW_MATRIX)


def _attend_tuned(shape: Shape, idx: int, name: str) -> None:
    parts = (shape.head_dim, shape.dtype, int(shape.kv_dtype is not None))
    if name == "prefill":
        _attend(prefill_attention, ((600, 600),), shape, {"tiles": prefill_candidates(*parts)[idx]})
    else:
        _attend(decode_attention, ((600, 1),), shape, {"tiles": decode_candidates(*parts)[idx]})


def _quantized_cases() -> Iterator[Case]:
    """`bf16/int8`: a bfloat16 model over an INT8 cache."""
    kinds = [(kind, head_dim, dtype) for kind in KV_DTYPES for head_dim in (64, 80, 128, 256) for dtype in ("bf16",)]
    kinds += [("int8", 128, "fp16"), ("fp8", 128, "fp16"), ("int8", 128, "fp32"), ("fp8", 64, "fp32")]
    for kind, head_dim, dtype in kinds:
        shape = Shape(head_dim, num_kv_heads=8, group=4, dtype=DTYPES[dtype], kv_dtype=KV_DTYPES[kind])
        label = f"{dtype}/{kind} d{head_dim}"
        yield from _attention_case(label, shape, {})
        if head_dim in (64, 128):
            yield Case(f"rope_and_write {label}", partial(_rope, shape), NO_MATRIX)


def _attend(kernel: Any, lengths: Any, shape: Shape, options: dict[str, Any]) -> None:
    case = attention_case(lengths, shape)
    kernel(case.q, case.kv, case.batch, case.scale, **options)


def _other_cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp32"):
        for head_dim in (64, 128):
            shape = Shape(head_dim=head_dim, num_kv_heads=8, group=4, dtype=DTYPES[dtype])
            yield Case(f"rope_and_write {dtype} d{head_dim}", partial(_rope, shape), NO_MATRIX)
        for copy in (gather_rows, scatter_rows):
            yield Case(f"{copy.__name__} {dtype}", partial(_copy, copy, 8 * 128 * DTYPES[dtype].itemsize), NO_MATRIX)
        for hidden in (576, 4096, 8192):
            x = torch.ones(4, hidden, dtype=DTYPES[dtype])
            yield Case(f"add_rms_norm {dtype} {hidden}", partial(add_rms_norm, x, x, x[0], 1e-5), NO_MATRIX)
            yield Case(f"rms_norm {dtype} {hidden}", partial(rms_norm, x, x[0], 1e-5), NO_MATRIX)
        x = torch.ones(4, 11008, dtype=DTYPES[dtype])
        yield Case(f"silu_mul {dtype}", partial(silu_mul, x, x), NO_MATRIX)


def _latent_cases() -> Iterator[Case]:
    """As DeepSeek has them: 512 numbers and 64 that turn, 16 heads of V2-Lite and 128 of V3."""
    for dtype, num_heads in itertools.product(("bf16", "fp16", "fp32"), (16, 128)):
        shape = {"rank": 512, "tail": 64, "num_heads": num_heads, "block_size": 16, "dtype": DTYPES[dtype]}
        for kernel, name, lengths, matrix in (
            (latent_prefill_attention, "prefill", ((600, 600),), WIDE_MATRIX),
            (latent_decode_attention, "decode", ((600, 1),), NARROW_MATRIX),
        ):
            wanted = EXACT_MATRIX if dtype == "fp32" else matrix
            run = partial(_attend_latents, kernel, lengths, shape)
            yield Case(f"latent {name} {dtype} h{num_heads}", run, wanted)
        yield Case(f"latent write {dtype} h{num_heads}", partial(_write_latents, shape), NO_MATRIX)


def _attend_latents(kernel: Any, lengths: Any, shape: dict[str, Any]) -> None:
    case = latent_case(lengths, shape | {"poison": 0.0})
    kernel(case.q, case.kv, case.batch, case.scale, shape["rank"])


def _write_latents(shape: dict[str, Any]) -> None:
    case = latent_case(((64, 64),), shape | {"poison": 0.0})
    q, latent, angles = case.q[..., shape["rank"] :], case.q[:, 0].contiguous(), torch.ones(64, shape["tail"])
    rope_and_write_latent(q, latent, angles, case.batch.positions, case.kv, case.batch.slot_mapping)


def _grouped_cases() -> Iterator[Case]:
    """Few pairs for each expert, as in a decode step, and many, as in prefill."""
    for dtype, (name, num_rows, matrix) in itertools.product(
        ("bf16", "fp32"), (("decode", 8, NARROW_MATRIX), ("prefill", 512, WIDE_MATRIX))
    ):
        wanted = EXACT_MATRIX if dtype == "fp32" else matrix
        yield Case(f"grouped_product {name} {dtype}", partial(_grouped, num_rows, DTYPES[dtype]), wanted)


def _grouped(num_rows: int, dtype: torch.dtype) -> None:
    expert_ids = torch.arange(2 * num_rows).view(num_rows, 2) % 8
    x, weights = torch.ones(num_rows, 1024, dtype=dtype), torch.ones(8, 512, 1024, dtype=dtype)
    grouped_product(x, weights, sort_pairs(expert_ids, 8), is_by_row=True)


def _sampling_cases() -> Iterator[Case]:
    logits, rows, numbers = torch.zeros(2, 49152), torch.arange(2), torch.ones(2)
    keys = torch.zeros((2, 2), dtype=torch.int32)
    yield Case("sample best", partial(row_best, logits), NO_MATRIX)
    yield Case("sample filter", partial(may_draw, logits, rows, numbers), NO_MATRIX)
    yield Case("sample draw", partial(may_draw, logits, rows, numbers, numbers, keys), NO_MATRIX)
    place = torch.arange(1000)
    yield Case("sample adjust", partial(adjust_logits, logits, place, torch.ones(4, 1000)), NO_MATRIX)


def _rope(shape: Shape) -> None:
    case = attention_case(((64, 64),), shape)
    k = case.q[:, : shape.num_kv_heads].contiguous()
    angles = torch.ones(64, shape.head_dim)
    rope_and_write(case.q.contiguous(), k, k, angles, case.batch.positions, case.kv, case.batch.slot_mapping)


def _copy(copy: Any, row_bytes: int) -> None:
    plane, part = (torch.zeros(2, num_rows, row_bytes, dtype=torch.uint8) for num_rows in (128, 100))
    copy(plane, torch.arange(100), slice(0, row_bytes), part)


def faults(facts: Facts, matrix: dict[str, str]) -> list[str]:
    """What is wrong with one compiled kernel. Merging splits has no dot."""
    wanted = "" if facts.kernel == "merge_splits_kernel" else matrix[facts.target]
    found = []
    if facts.spilled:
        found.append(f"spills {facts.spilled}")
    if facts.load_bytes[-1] < 16:
        found.append(f"widest load is {facts.load_bytes[-1]} bytes")
    if facts.load_bytes[0] < 4:
        found.append(f"loads {facts.load_bytes[0]} bytes at a time")
    if wanted not in facts.matrix or (wanted and not facts.matrix):
        found.append(f"no {wanted}")
    if facts.shared_bytes > SHARED_LIMIT[facts.target]:
        found.append(f"needs {facts.shared_bytes} bytes of shared memory")
    return found


def table(targets: list[str], chosen: list[Case]) -> Iterator[tuple[Case, Facts, list[str]]]:
    for case in chosen:
        for target in targets:
            for facts in compile_launches(target, case.run):
                yield case, facts, faults(facts, case.matrix)


def _line(*columns: object) -> str:
    return "{:30} {:26} {:7} {:>4} {:>7} {:>6} {:>12}  {:16} {}".format(*columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.case in case.name]
    print(_line("case", "kernel", "target", "regs", "shared", "spill", "load bytes", "matrix", ""))
    num_faults = num_kernels = 0
    for case, facts, found in table(options.target or list(TARGETS), chosen):
        widths = "/".join(map(str, facts.load_bytes))
        row = (facts.kernel, facts.target, facts.registers, facts.shared_bytes, facts.spilled, widths, facts.matrix)
        print(_line(case.name, *row, "; ".join(found)), flush=True)
        num_kernels += 1
        num_faults += bool(found)
    print(f"{num_kernels} kernels compiled, {num_faults} with faults")
    return 1 if num_faults or not num_kernels else 0


if __name__ == "__main__":
    sys.exit(main())
