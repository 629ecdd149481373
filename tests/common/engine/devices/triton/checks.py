"""Every kernel held to its reference over a pairwise grid, on any device: the interpreter's CPU or a GPU.

A check raises AssertionError. Bounds stand beside the comparison.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.contract.attention import LayerKV
from common.engine.devices.triton.chunk import (
    gather_rows,
    gather_rows_reference,
    scatter_rows,
    scatter_rows_reference,
)
from common.engine.devices.triton.decode_attention import SPLIT_LEN, decode_attention, decode_attention_reference
from common.engine.devices.triton.grouped_product import grouped_product, grouped_product_reference, sort_pairs
from common.engine.devices.triton.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from common.engine.devices.triton.prefill_attention import prefill_attention, prefill_attention_reference
from common.engine.devices.triton.rope_write import rope_and_write, rope_and_write_reference
from common.engine.devices.triton.sampling import (
    adjust_logits,
    adjust_logits_reference,
    may_draw,
    may_draw_reference,
    row_best,
    row_best_reference,
)
from common.engine.devices.triton.silu_mul import silu_mul, silu_mul_reference
from common.engine.kv.attention_planes import read_rows
from tests.common.engine.devices.triton.cases import (
    ROUNDING_BOUND,
    AttentionCase,
    Shape,
    angles,
    attention_bound,
    attention_case,
    code_step,
    poisoned_cache,
    projections,
    random_bits,
    without_released,
)
from tests.common.engine.devices.triton.latent_checks import (
    LATENT_AXES,
    LATENT_WRITE_AXES,
    check_latent_decode,
    check_latent_prefill,
    check_latent_write,
)
from tests.common.engine.devices.triton.pairwise import Case, pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (None, torch.int8, torch.float8_e4m3fn)
SHAPE_AXES: dict[str, tuple[Any, ...]] = {
    "head_dim": (16, 24, 64, 80, 96, 128, 256),
    "group": (1, 2, 3, 4, 5, 6, 7, 8),
    "num_kv_heads": (1, 2),
    "block_size": (16, 8, 32, 24),
    "dtype": DTYPES,
    "is_sliced": (False, True),
    "poison": (float("nan"), float("inf")),
    "kv_dtype": KV_DTYPES,
}
OPTION_AXES: dict[str, tuple[Any, ...]] = {"window": (0, 1, 7, 64), "soft_cap": (0.0, 2.0), "has_sinks": (False, True)}
# (seq_len, query_len) per sequence: block_size and tile edges, cached prefixes of any length, and no work at all.
PREFILL_BATCHES = (
    (),
    ((1, 1),),
    ((15, 15), (16, 16), (17, 17)),
    ((31, 2), (33, 33), (1, 1)),
    ((127, 3), (128, 128), (129, 17)),
    ((40, 0), (65, 64), (0, 0), (300, 1)),
    ((64, 63), (63, 7), (300, 20)),
)
DECODE_BATCHES = (
    (),
    ((1, 1),),
    ((15, 1), (16, 1), (17, 1), (31, 1), (33, 1)),
    ((127, 1), (128, 1), (129, 1)),
    ((0, 1), (40, 0), (SPLIT_LEN, 1)),
    ((SPLIT_LEN - 1, 1), (SPLIT_LEN + 1, 1), (5, 1)),
    ((2 * SPLIT_LEN, 1), (3, 1)),
)
NUM_SLOTS = 64


def compare_attention(kernel: Any, reference: Any, case: AttentionCase, **options: Any) -> None:
    """Within the type's bound of float64, finite though every unused slot and all behind a window is poisoned."""
    out = kernel(case.q, without_released(case, options.get("window", 0)).kv, case.batch, case.scale, **options)
    options.pop("tiles", None)
    expected = reference(case.q, case.kv, case.batch, case.scale, **options)
    assert out.dtype == case.q.dtype
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=attention_bound(case))


def check_prefill(case: Case, device: str) -> None:
    inputs, options = _attention_inputs(case, device)
    compare_attention(prefill_attention, prefill_attention_reference, inputs, **options)


def check_decode(case: Case, device: str) -> None:
    inputs, options = _attention_inputs(case, device)
    compare_attention(decode_attention, decode_attention_reference, inputs, **options)


def _attention_inputs(case: Case, device: str) -> tuple[AttentionCase, dict[str, Any]]:
    shape = Shape(**{name: case[name] for name in SHAPE_AXES}, device=device)
    inputs, options = attention_case(case["batch"], shape), {name: case[name] for name in OPTION_AXES}
    num_heads = inputs.q.shape[1]
    sinks = torch.linspace(-1.0, 2.0, num_heads, device=device) if options.pop("has_sinks") else None
    return inputs, options | {"sinks": sinks}


def check_rope_and_write(case: Case, device: str) -> None:
    """The whole cache is compared: -3 marks a slot that nobody wrote."""
    q, k, v = (x.to(device) for x in projections(**{n: value for n, value in case.items() if n != "kv_dtype"}))
    num_tokens, num_kv_heads, head_dim = k.shape
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(9 * 16, generator=generator)[:num_tokens].to(device)
    positions = torch.randint(200, (num_tokens,), generator=generator).to(device)
    shape = Shape(head_dim, num_kv_heads, dtype=case["dtype"], poison=-3.0, kv_dtype=case["kv_dtype"])
    caches = [tuple(plane.to(device) for plane in poisoned_cache(9, shape)) for _ in range(2)]
    before = [x.clone() for x in (q, k, v)]
    cos_sin = angles(head_dim).to(device)
    rotated = rope_and_write(q, k, v, cos_sin, positions, caches[0], slots)
    expected = rope_and_write_reference(q, k, v, cos_sin, positions, caches[1], slots)
    # |x cos + y sin| <= 2 for inputs in [-1, 1]
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(rotated, expected, rtol=0, atol=bound)
    if case["kv_dtype"] is None:
        torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=bound)
    else:
        compare_codes(caches, slots)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def compare_codes(caches: list[LayerKV], slots: torch.Tensor) -> None:
    """Written rows are at most one code apart, and rarely that; every other byte is equal."""
    ours, expected = (
        torch.stack(read_rows(kv, slots, torch.float32)).flatten(0, 1) for kv in caches
    )  # [2 * num_tokens, num_kv_heads, head_dim]
    # in steps between codes; scales may differ in their last bits
    distance = (ours - expected).abs() / code_step(expected, caches[0][0].dtype).clamp(min=1e-9)
    assert (distance <= 1.001).all()
    assert (distance > 0.01).float().sum() <= 1 + 0.01 * distance.numel()
    for planes in zip(*caches, strict=True):
        unwritten = [plane.view(torch.uint8).flatten(0, 1).clone() for plane in planes]
        for rows in unwritten:
            rows[slots] = 0
        assert torch.equal(*unwritten)


def check_gather_rows(case: Case, device: str) -> None:
    plane, slots, part = (x.to(device) for x in copy_inputs(case))
    expected = part.clone()
    gather_rows(plane, slots, columns_of(case), part)
    gather_rows_reference(plane, slots, columns_of(case), expected)
    assert torch.equal(part, expected)


def check_scatter_rows(case: Case, device: str) -> None:
    plane, slots, part = (x.to(device) for x in copy_inputs(case))
    expected = plane.clone()
    scatter_rows(plane, slots, columns_of(case), part)
    scatter_rows_reference(expected, slots, columns_of(case), part)
    assert torch.equal(plane, expected)


def columns_of(case: Case) -> slice:
    """Of shards of `shard_bytes` those that the case names."""
    return slice(case["shards"].start * case["shard_bytes"], case["shards"].stop * case["shard_bytes"])


def copy_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(plane of NUM_SLOTS and 3 shards, slots, part) of random bytes."""
    columns = columns_of(case)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2))[: case["num_tokens"]]
    plane = random_bits((case["num_layers"], NUM_SLOTS, 3 * case["shard_bytes"]), torch.uint8, 0)
    part = random_bits((case["num_layers"], case["num_tokens"], columns.stop - columns.start), torch.uint8, 1)
    return plane, slots, part


def check_add_rms_norm(case: Case, device: str) -> None:
    x, residual = _halves(case, 1.0, device)
    weight = torch.linspace(0.5, 1.5, case["size"], device=device).to(case["dtype"])
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    expected_out, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    # two roundings lie between inputs and output
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(total, expected_total, rtol=bound, atol=0)
    torch.testing.assert_close(out, expected_out, rtol=bound, atol=bound)


def check_rms_norm(case: Case, device: str) -> None:
    """Heads of a token, which may be slices of one fused projection."""
    num_tokens, num_heads, size = case["num_tokens"], case["num_heads"], case["size"]
    fused = torch.randn(num_tokens, num_heads + case["is_sliced"], size, generator=torch.Generator().manual_seed(0))
    x = fused.to(case["dtype"]).to(device)[:, :num_heads]
    weight = torch.linspace(0.5, 1.5, size, device=device).to(case["dtype"])
    bound = ROUNDING_BOUND[case["dtype"]]
    for rows in (x, x[:, 0]) if num_heads == 1 else (x,):
        torch.testing.assert_close(
            rms_norm(rows, weight, 1e-5), rms_norm_reference(rows, weight, 1e-5), rtol=bound, atol=0
        )


def check_silu_mul(case: Case, device: str) -> None:
    gate, up = _halves(case, 4.0, device)
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(silu_mul(gate, up), silu_mul_reference(gate, up), rtol=bound, atol=1e-6)


def check_grouped_product(case: Case, device: str) -> None:
    """Rows for each pair, or for each row of `num_active` pairs. Some experts are chosen by nobody."""
    generator = torch.Generator().manual_seed(0)
    num_experts, num_active, num_in = case["num_experts"], min(case["num_active"], case["num_experts"]), case["num_in"]
    scores = torch.rand((case["num_rows"], num_experts), generator=generator)
    scores[:, num_experts // 2 :: 3] -= float(num_active < num_experts // 2)
    expert_ids = scores.topk(num_active).indices.to(device)
    num_rows = expert_ids.shape[0] if case["is_by_row"] else expert_ids.numel()
    x = torch.rand((num_rows, num_in), generator=generator).to(case["dtype"]).to(device)
    weights = torch.randn((num_experts, case["num_out"], num_in), generator=generator).to(case["dtype"]).to(device)
    pairs = sort_pairs(expert_ids, num_experts)
    found = grouped_product(x, weights, pairs, is_by_row=case["is_by_row"])
    expected = grouped_product_reference(x, weights, expert_ids, is_by_row=case["is_by_row"])
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * num_in**0.5)


def check_row_best(case: Case, device: str) -> None:
    """Exactly, ties to the first."""
    logits = _logits(case, device)
    for ours, expected in zip(row_best(logits), row_best_reference(logits), strict=True):
        assert torch.equal(ours, expected)


def check_may_draw(case: Case, device: str) -> None:
    """Exactly: a comparison."""
    logits = _logits(case, device)
    rows = torch.arange(case["num_rows"], device=device).flip(0)
    floors = logits[rows].nan_to_num().median(1).values if len(rows) else torch.zeros(0, device=device)
    assert torch.equal(may_draw(logits, rows, floors), may_draw_reference(logits, rows, floors))


def check_adjust_logits(case: Case, device: str) -> None:
    """Exactly: the same operations, each rounded once."""
    logits = _logits(case, device).contiguous()
    expected = logits.clone()
    generator = torch.Generator().manual_seed(3)
    place = torch.randperm(logits.numel(), generator=generator)[: case["num_entries"]].to(device)
    values = torch.rand((4, len(place)), generator=generator) + 0.5
    values[3] = (values[3] > 1.3).float()
    adjust_logits(logits, place, values.to(device))
    adjust_logits_reference(expected, place, values.to(device))
    assert torch.equal(logits.nan_to_num(1e9), expected.nan_to_num(1e9))


def _logits(case: Case, device: str) -> torch.Tensor:
    """[num_rows, vocab_size] with ties; some rows hold NaN or -inf."""
    size = (case["num_rows"], case["vocab_size"] + case["is_sliced"])
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(50).round_().div_(8)
    logits[1::3, 0] = float("nan")
    logits[2::3, :1] = float("-inf")
    return logits.to(device)[:, : case["vocab_size"]]


def _halves(case: Case, scale: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [num_tokens, size] tensors: halves of one fused projection, or tensors of their own."""
    generator = torch.Generator().manual_seed(0)
    fused = scale * torch.randn(case["num_tokens"], 2 * case["size"], generator=generator)
    left, right = fused.to(case["dtype"]).to(device).chunk(2, dim=1)
    return (left, right) if case["is_sliced"] else (left.contiguous(), right.contiguous())


@dataclass(frozen=True, slots=True)
class Grid:
    """A kernel's check and the cases that it must hold for."""

    check: Callable[[Case, str], None]
    cases: tuple[Case, ...]


_ATTENTION_AXES = {**SHAPE_AXES, **OPTION_AXES}
_ROPE_AXES = {
    "num_tokens": (0, 1, 15, 16, 17, 33),
    "num_kv_heads": (1, 2, 3),
    "group": (1, 2, 3, 5, 8),
    "head_dim": (16, 24, 64, 80, 96, 128, 256),
    "dtype": DTYPES,
    "is_fused": (True, False),
    "kv_dtype": KV_DTYPES,
}
_COPY_AXES = {
    "num_tokens": (0, 1, 15, 16, 17, 33),
    "num_layers": (0, 1, 3),
    "shard_bytes": (4, 16, 24, 64, 80, 256, 1024),
    "shards": (range(3), range(1), range(1, 3), range(2, 3)),
}
_ROW_AXES = {
    "num_tokens": (0, 1, 3, 17),
    "size": (1, 16, 96, 576, 1000, 1536, 2049),
    "dtype": DTYPES,
    "is_sliced": (False, True),
}
_SAMPLE_AXES = {
    "num_rows": (0, 1, 4),
    "vocab_size": (1, 127, 128, 129, 4095, 4097, 9000),
    "is_sliced": (False, True),
    "num_entries": (0, 1, 255, 257),
}
_GROUPED_AXES = {
    "num_rows": (0, 1, 5, 33, 70),
    "num_active": (1, 2, 4),
    "num_experts": (1, 3, 8, 40),
    "num_in": (16, 48, 64, 100, 130),
    "num_out": (8, 64, 72, 130),
    "dtype": DTYPES,
    "is_by_row": (True, False),
}
GRIDS = {
    "grouped_product": Grid(check_grouped_product, pairwise(_GROUPED_AXES)),
    "prefill_attention": Grid(check_prefill, pairwise({"batch": PREFILL_BATCHES, **_ATTENTION_AXES})),
    "decode_attention": Grid(check_decode, pairwise({"batch": DECODE_BATCHES, **_ATTENTION_AXES})),
    "rope_and_write": Grid(check_rope_and_write, pairwise(_ROPE_AXES)),
    "latent_prefill": Grid(check_latent_prefill, pairwise({"batch": PREFILL_BATCHES, **LATENT_AXES})),
    "latent_decode": Grid(check_latent_decode, pairwise({"batch": DECODE_BATCHES, **LATENT_AXES})),
    "latent_write": Grid(check_latent_write, pairwise(LATENT_WRITE_AXES)),
    "gather_rows": Grid(check_gather_rows, pairwise(_COPY_AXES)),
    "scatter_rows": Grid(check_scatter_rows, pairwise(_COPY_AXES)),
    "rms_norm": Grid(check_rms_norm, pairwise(_ROW_AXES | {"num_heads": (1, 3)})),
    "add_rms_norm": Grid(check_add_rms_norm, pairwise(_ROW_AXES)),
    "row_best": Grid(check_row_best, pairwise(_SAMPLE_AXES)),
    "may_draw": Grid(check_may_draw, pairwise(_SAMPLE_AXES)),
    "adjust_logits": Grid(check_adjust_logits, pairwise(_SAMPLE_AXES)),
    "silu_mul": Grid(check_silu_mul, pairwise(_ROW_AXES)),
}
