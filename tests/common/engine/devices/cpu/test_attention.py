"""The cpu attention backend against float64 attention, one sequence and head at a time."""

import math
from dataclasses import replace

import pytest
import torch

from common.checkpoint.layers import AttentionOptions, Rope
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.kv_spec import first_token_needed
from common.engine.devices.cpu.attention import CpuAttention, rotate
from common.engine.devices.cpu.gathers import group_by_length
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.engine.model.rope import cos_sin_table
from tests.common.engine.model.batches import Run, batch_of, scattered_runs

NUM_BLOCKS = 128
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EDGE_LENS = [1, 15, 16, 17, 33]


def table(head_dim: int) -> torch.Tensor:
    return cos_sin_table(Rope(10000.0), head_dim, max_position=512)


class Case:
    """A poisoned cache in which only the sequences' own slots hold numbers, and what attention must give."""

    def __init__(
        self,
        runs: list[Run],
        block_size: int,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        ops: NativeOps | None = None,
    ) -> None:
        self.runs, self.block_size, self.dtype, self.ops = runs, block_size, dtype, ops
        num_heads, num_kv_heads, head_dim = heads
        self.options, self.cos_sin = AttentionOptions(head_dim**-0.5, window, soft_cap), table(head_dim)
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.kv = torch.full((2, NUM_BLOCKS, block_size, num_kv_heads, head_dim), math.nan, dtype=dtype)
        self.kv[1] = math.inf
        flat = self.kv.view(2, -1, num_kv_heads, head_dim)
        for run in runs:
            cached = run.slots(block_size)[: run.start]
            flat[:, cached] = randn(2, run.start, num_kv_heads, head_dim)
        num_tokens = sum(run.num_new for run in runs)
        self.q = randn(num_tokens, num_heads, head_dim)
        self.k, self.v = randn(num_tokens, num_kv_heads, head_dim), randn(num_tokens, num_kv_heads, head_dim)

    def run(self, batch: AttentionBatch | None = None) -> torch.Tensor:
        backend, batch = CpuAttention(self.ops), batch or batch_of(self.runs, self.block_size)
        q = backend.rope_and_write(self.q, self.k, self.v, self.cos_sin, tuple(self.kv), batch)
        return backend.attend(q, self._without_released(), batch, self.options)

    def _without_released(self) -> LayerKV:
        """The cache when others have what lies behind the window: no numbers are left there."""
        kv = self.kv.clone()
        for run in self.runs:
            behind = run.slots(self.block_size)[: first_token_needed(run.start, self.options.window)]
            kv.view(2, -1, *kv.shape[3:])[:, behind] = math.nan
        return tuple(kv)

    def expected(self) -> torch.Tensor:
        """Reads the cache as `run` left it."""
        flat = self.kv.double().view(2, -1, *self.kv.shape[3:])
        outputs, first = [], 0
        for run in self.runs:
            k, v = flat[:, run.slots(self.block_size)]
            q = self.q[first : first + run.num_new].double()
            outputs.append(self._attend(turn(q, run.start), k, v, run))
            first += run.num_new
        return torch.cat(outputs)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.options.scale
        if self.options.soft_cap:
            scores = self.options.soft_cap * (scores / self.options.soft_cap).tanh()
        future = torch.ones(run.num_new, run.seq_len, dtype=torch.bool).triu(run.start + 1)
        if self.options.window:
            future |= torch.ones(run.num_new, run.seq_len, dtype=torch.bool).tril(run.start - self.options.window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)

    def check(self) -> None:
        output = self.run()
        assert output.isfinite().all()
        torch.testing.assert_close(
            output.double(), self.expected(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype]
        )


def turn(x: torch.Tensor, start: int) -> torch.Tensor:
    """RoPE in float64 with complex numbers: pair (i, i + half) turns by position * theta ** (-2i / head_dim)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(start, start + len(x), dtype=torch.float64), frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq_len", EDGE_LENS)
def test_unused_slots_never_reach_the_output(seq_len: int, dtype: torch.dtype) -> None:
    for start in {0, seq_len // 2, seq_len - 1}:
        runs = scattered_runs([(start, seq_len - start)], 16, NUM_BLOCKS)
        Case(runs, 16, (4, 2, 16), dtype).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1, 64), (2, 2, 24), (6, 2, 80), (9, 3, 64), (8, 1, 16)], ids=str)
def test_a_mixed_batch_equals_float64_attention(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lens = [(33, 1), (0, 17), (127, 1), (16, 15), (0, 1), (15, 1), (31, 129), (200, 1)]
    for block_size in (8, 16):
        Case(scattered_runs(lens, block_size, NUM_BLOCKS), block_size, heads, dtype).check()


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_window_and_soft_cap_equal_float64_attention_and_nothing_behind_is_read(
    window: int, soft_cap: float, is_compiled: bool
) -> None:
    ops = native_ops() if is_compiled else None
    if is_compiled and ops is None:
        pytest.skip("no C++ compiler")
    lens = [(33, 1), (0, 17), (127, 1), (16, 150), (0, 1), (15, 1), (100, 70), (200, 1)]
    runs = scattered_runs(lens, 16, NUM_BLOCKS)
    for heads, dtype in (((6, 2, 24), torch.float32), ((4, 2, 64), torch.bfloat16), ((4, 1, 256), torch.bfloat16)):
        Case(runs, 16, heads, dtype, window=window, soft_cap=soft_cap, ops=ops).check()


def test_layers_of_two_groups_read_their_own_blocks_in_turn() -> None:
    """Both batches of a step; the backend keeps what it gathered for each, and forgets it with the step."""
    first, second = (
        Case(scattered_runs([(40, 1), (9, 4)], 16, NUM_BLOCKS, seed), 16, (4, 2, 16), torch.float32) for seed in (0, 1)
    )
    backend = CpuAttention(None)
    for _ in range(2):
        whole = batch_of(first.runs, 16)
        parts = batch_of(second.runs, 16)
        batches = whole, replace(whole, slot_mapping=parts.slot_mapping, block_tables=parts.block_tables)
        for case, batch in ((first, batches[0]), (second, batches[1]), (first, batches[0])):
            q = backend.rope_and_write(case.q, case.k, case.v, case.cos_sin, tuple(case.kv), batch)
            output = backend.attend(q, tuple(case.kv), batch, case.options)
            torch.testing.assert_close(output.double(), case.expected(), atol=1e-5, rtol=1e-5)
        assert len(backend._gathers) == 2


def test_rope_and_write_puts_rotated_keys_into_their_slots_and_nothing_else() -> None:
    case = Case(scattered_runs([(5, 20), (16, 1)], 16, NUM_BLOCKS), 16, (4, 2, 16), torch.float32)
    before = case.kv.clone()
    case.run()
    written = torch.zeros(NUM_BLOCKS * 16, dtype=torch.bool)
    for run in case.runs:
        written[run.slots(16)[run.start :]] = True
    after, old = (kv.view(2, -1, 2, 16) for kv in (case.kv, before))
    assert torch.equal(after[:, ~written].nan_to_num(1.0), old[:, ~written].nan_to_num(1.0))
    first = case.runs[0]
    expected = turn(case.k[:20].double(), first.start)
    torch.testing.assert_close(after[0, first.slots(16)[5:]].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(after[1, first.slots(16)[5:]], case.v[:20])


def test_a_token_without_a_slot_is_not_written() -> None:
    case = Case(scattered_runs([(0, 3)], 16, NUM_BLOCKS), 16, (4, 2, 16), torch.float32)
    batch = batch_of(case.runs, 16)
    case.kv.fill_(7.0)
    slots = batch.slot_mapping.clone()
    slots[1] = -1
    case.run(replace(batch, slot_mapping=slots))
    flat = case.kv.view(2, -1, 2, 16)
    assert (flat[:, -1] == 7.0).all()  # slot -1 would be the last
    assert (flat[:, case.runs[0].slots(16)[1]] == 7.0).all()
    assert (flat[1, case.runs[0].slots(16)[2]] == case.v[2]).all()


def test_the_same_step_in_another_row_order_gives_the_same_rows() -> None:
    runs = scattered_runs([(33, 1), (0, 17), (63, 1)], 16, NUM_BLOCKS)
    case, turned = (Case(order, 16, (4, 2, 16), torch.float32) for order in (runs, runs[::-1]))
    turned.kv.copy_(case.kv)
    rows = [slice(18, 19), slice(1, 18), slice(0, 1)]
    for name in "qkv":
        original = getattr(case, name)
        setattr(turned, name, torch.cat([original[18:19], original[1:18], original[0:1]]))
    output, other = case.run(), turned.run()
    torch.testing.assert_close(torch.cat([other[rows[0]], other[rows[1]], other[rows[2]]]), output)


def test_decode_rows_are_grouped_so_that_padding_is_bounded() -> None:
    lens = [5000, 10, 130, 90, 2600, 128, 300]
    groups = group_by_length(list(range(7)), lens)
    assert [[lens[seq] for seq in group] for group in groups] == [[10, 90, 128], [130], [300], [2600, 5000]]
    assert group_by_length([], lens) == []


def test_rotation_keeps_the_norm_of_each_pair() -> None:
    x = torch.randn(5, 2, 32)
    cos, sin = table(32)[3:8].unsqueeze(1).chunk(2, dim=-1)
    rotated = rotate(x, cos, sin)
    pairs, turned = (t.view(5, 2, 2, 16).norm(dim=2) for t in (x, rotated))
    torch.testing.assert_close(turned, pairs)
