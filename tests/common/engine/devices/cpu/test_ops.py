"""The compiled operators against float64 and against the torch definitions they stand in for."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.checkpoint.layers import AttentionOptions
from common.engine.contract.attention import AttentionBackend
from common.engine.contract.elementwise import TorchElementwise
from common.engine.contract.plan import SampleSpec
from common.engine.devices.cpu.attention import CpuAttention
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.engine.sampling import SampleError, sample
from common.engine.sampling.noise import gumbel, gumbel_of, hash_with, key_halves
from common.values.request import SamplingParams
from tests.common.engine.devices.cpu.test_attention import table
from tests.common.engine.model.batches import Run, batch_of, scattered_runs

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
MIXED = [(0, 1), (4, 1), (15, 1), (16, 1), (0, 7), (200, 1), (33, 20)]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    found = native_ops()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (17, 100), (40, 33), (2, 5, 24)], ids=str)
def test_rms_norms_are_those_of_float64(
    ops: NativeOps, threads: None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual, weight = (torch.randn(*size).to(dtype) for size in (shape, shape, shape[-1:]))
    exact = TorchElementwise()
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    expected = exact.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), expected, **close)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), exact.rms_norm(total.double(), weight.double(), 1e-5), **close)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 3072), (33, 66)], ids=str)
def test_silu_mul_is_that_of_float64_for_any_number(
    ops: NativeOps, threads: None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(*shape) * 30).to(dtype)
    expected = TorchElementwise().silu_mul(gate_up.double())
    torch.testing.assert_close(ops.silu_mul(gate_up).double(), expected, atol=1e-5, rtol=TOLERANCE[dtype])
    gate_up[0, 0] = math.nan
    assert ops.silu_mul(gate_up)[0, 0].isnan()


@pytest.mark.parametrize("size", [0, 1])
def test_views_that_are_not_contiguous_are_computed_too(ops: NativeOps, size: int) -> None:
    x = torch.randn(8, 2 * size + 8)[:, ::2]
    weight = torch.randn(x.shape[1])
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), TorchElementwise().rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 64), (8, 1, 128), (6, 1, 24), (10, 2, 80), (4, 2, 256)], ids=str)
def test_attention_over_blocks_equals_torchs_and_reads_no_foreign_slot(
    ops: NativeOps, threads: None, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    runs = scattered_runs(MIXED, block_size, num_blocks=400)
    results = [_attend(backend, runs, block_size, heads, dtype) for backend in (CpuAttention(ops), CpuAttention(None))]
    torch.testing.assert_close(*(out.double() for out, _ in results), atol=4 * TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(*(kv for _, kv in results), equal_nan=True)


def _attend(
    backend: AttentionBackend,
    runs: list[Run],
    block_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache; slots that no sequence owns hold NaN. q, k and v are views of one product."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(2)
    kv = torch.full((2, 400, block_size, num_kv_heads, head_dim), math.nan, dtype=dtype)
    flat = kv.view(2, -1, num_kv_heads, head_dim)
    for run in runs:
        cached = run.slots(block_size)[: run.start]
        flat[:, cached] = torch.randn(2, run.start, num_kv_heads, head_dim, generator=generator).to(dtype)
    num_tokens = sum(run.num_new for run in runs)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    batch = batch_of(runs, block_size)
    layer = tuple(kv)
    rotated = backend.rope_and_write(q, k, v, table(head_dim), layer, batch)
    return backend.attend(rotated, layer, batch, AttentionOptions(head_dim**-0.5)), kv


@pytest.mark.parametrize("window", [0, 21])
def test_a_sequence_attends_alike_alone_and_in_any_batch(ops: NativeOps, threads: None, window: int) -> None:
    options = AttentionOptions(0.125, window)
    runs = scattered_runs([(40, 1), (3, 1), (100, 1)] * 6, 16, num_blocks=400)
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 400, 16, 3, 64, generator=generator)
    q = torch.randn(len(runs), 9, 64, generator=generator)
    out = torch.empty_like(q)
    ops.decode_attention(out, q, tuple(kv), batch_of(runs, 16), options)
    for row, run in enumerate(runs):
        alone = torch.empty_like(q[:1])
        ops.decode_attention(alone, q[row : row + 1], tuple(kv), batch_of([run], 16), options)
        assert torch.equal(alone[0], out[row])


def test_a_slot_of_minus_one_is_not_written(ops: NativeOps) -> None:
    batch = batch_of([Run(0, 2, (0,))], 4)
    batch.slot_mapping[1] = -1
    kv = torch.zeros(2, 1, 4, 1, 8)
    ones = torch.ones(2, 1, 8)
    ops.rope_write(ones, ones, ones, table(8), tuple(kv), batch)
    assert kv[1].sum() == 8


def specs_of(params: SamplingParams, count: int) -> list[SampleSpec]:
    return [SampleSpec(row % 3, row * 7, params) for row in range(count)]


@pytest.mark.parametrize("spread", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("temperature", [1e-4, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 255, 257, 5000])
def test_narrowed_draws_are_the_draws_of_the_whole_vocabulary(
    ops: NativeOps, threads: None, spread: float, temperature: float, vocab_size: int
) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(4)) * spread
    specs = specs_of(SamplingParams(seed=9, max_tokens=4, temperature=temperature), 24)
    assert sample(logits, specs, ops) == sample(logits, specs)


def test_narrowed_draws_bear_penalties_filters_greedy_rows_and_rows_that_are_not_finite(ops: NativeOps) -> None:
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(5)) * 4
    logits[3, 17], logits[4] = math.nan, -math.inf
    logits[5, 100:] = -math.inf
    kinds = [{}, {"top_k": 5}, {"temperature": 0.0}, {}, {}, {"logit_bias": ((7, 50.0),)}, {"allowed_token_ids": (7,)}]
    specs = [
        SampleSpec(0, row, SamplingParams(**({"seed": row, "max_tokens": 1, "temperature": 1.0} | kind)))
        for row, kind in enumerate(kinds)
    ]
    specs[6] = replace(specs[6], banned_token_ids=(7,))
    drawn = sample(logits, specs, ops)
    assert drawn == sample(logits, specs)
    assert [isinstance(token, SampleError) for token in drawn] == [False, False, False, True, True, False, True]


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_one_token_is_left_of_a_flat_vocabulary_and_of_a_peaked_one(ops: NativeOps, spread: float) -> None:
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(6)) * spread
    logits[0, 5] = 10 * spread
    keys = torch.tensor([[3], [4]], dtype=torch.int32)
    sums = logits[0] + gumbel_of(hash_with(3, 4, torch.arange(49152, dtype=torch.int32)))
    found = ops.draw_candidates(logits, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([5]), keys)
    assert found.counts == [len(found.token_ids)]
    assert found.token_ids.tolist() == [int(sums.argmax())]


@pytest.mark.parametrize("seed", range(8))
def test_a_near_tie_of_a_draw_is_left_to_the_exact_sums(ops: NativeOps, seed: int) -> None:
    """Two tokens whose sums differ by less than two logarithms may: both are left, and torch's decide."""
    spec = SampleSpec(0, 9, SamplingParams(seed=seed, max_tokens=1, temperature=0.7))
    keys = torch.tensor([key_halves(seed, 0, 9)], dtype=torch.int32).T.contiguous()
    logits = torch.randn(1, 4099, generator=torch.Generator().manual_seed(seed)) * 2
    sums = logits[0] / 0.7 + gumbel(seed, 0, 9, torch.arange(4099, dtype=torch.int32))
    first, second = sums.topk(2).indices.tolist()
    logits[0, second] += 0.7 * (sums[first] - sums[second]) + (seed - 4) * 1e-6
    best_ids = logits.argmax(dim=1)
    found = ops.draw_candidates(logits, torch.tensor([0]), torch.tensor([0.7]), best_ids, keys)
    assert found.token_ids.tolist() == sorted([first, second])
    assert sample(logits, [spec], ops) == sample(logits, [spec])
