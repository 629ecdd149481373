"""Every kernel against its reference on the GPU, and what the interpreter cannot show: races, wide offsets, graphs."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.devices.triton.decode_attention import decode_attention
from common.engine.devices.triton.prefill_attention import prefill_attention
from common.engine.devices.triton.rope_write import rope_and_write
from tests.common.engine.devices.triton.cases import Shape, attention_case
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.pairwise import case_id
from tests.gpu.report import Report, error_of

NUM_REPEATS = 50
MANY_PROGRAMS = Shape(head_dim=128, num_kv_heads=16, group=4, dtype=torch.bfloat16, device="cuda")

Job = tuple[str, int]  # name of a grid, index of a case


def check_kernels(report: Report) -> None:
    """The whole grid, then what only a GPU can show."""
    check_jobs(report, [(name, idx) for name, grid in GRIDS.items() for idx in range(len(grid.cases))], "cuda")
    for check in (repeat_bit_equal, replay_decode_graph, use_last_block_of_large_pool):
        report.check(check.__name__, error_of(check))
    print(f"{report.num_checks} checks, {len(report.failures)} failed", flush=True)


def check_jobs(report: Report, jobs: Sequence[Job], device: str) -> None:
    """In parallel processes, because compiling takes most of the time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(8, len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        errors = list(pool.map(partial(run_case, device=device), *zip(*jobs, strict=True), chunksize=4))
    for (name, idx), error in zip(jobs, errors, strict=True):
        report.check(f"{name}[{case_id(GRIDS[name].cases[idx])}]", error)


def run_case(name: str, idx: int, device: str) -> str | None:
    """Error of one case of a grid, or None."""
    grid = GRIDS[name]
    return error_of(lambda: grid.check(grid.cases[idx], device))


def repeat_bit_equal(shape: Shape = MANY_PROGRAMS, num_repeats: int = NUM_REPEATS) -> None:
    """Same bits every time, whatever lies in the memory that outputs and partial results are taken from."""
    for kernel, lengths in ((decode_attention, ((600, 1), (33, 1))), (prefill_attention, ((300, 100), (33, 33)))):
        case = attention_case(lengths, shape)
        first = kernel(case.q, case.kv, case.batch, case.scale)
        for _ in range(num_repeats):
            _poison_free_memory(shape.device)
            assert torch.equal(kernel(case.q, case.kv, case.batch, case.scale), first)


def _poison_free_memory(device: str) -> None:
    """Give NaN back to the allocator, which hands it to the next launch; it keeps pools of small and large pieces."""
    pieces = [torch.full((size,), float("nan"), device=device) for size in (*[1 << 12] * 128, 1 << 22)]
    pieces.clear()


def replay_decode_graph() -> None:
    """A captured step follows its inputs: lengths and block tables are read when it is replayed."""
    shape = Shape(head_dim=128, group=4, dtype=torch.bfloat16, device="cuda")
    captured, other = (attention_case(lengths, shape) for lengths in (((900, 1), (33, 1)), ((700, 1), (0, 1))))
    decode_attention(captured.q, captured.kv, captured.batch, captured.scale)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(captured.q, captured.kv, captured.batch, captured.scale)
    captured.q.copy_(other.q)
    captured.batch.seq_lens.copy_(other.batch.seq_lens)
    captured.batch.block_tables.zero_()
    captured.batch.block_tables[:, : other.batch.block_tables.shape[1]].copy_(other.batch.block_tables)
    for plane, values in zip(captured.kv, other.kv, strict=True):
        plane[: len(values)].copy_(values)
    graph.replay()
    torch.testing.assert_close(out, decode_attention(other.q, other.kv, other.batch, other.scale), rtol=0, atol=0)


def use_last_block_of_large_pool() -> None:
    """One plane of more than 2**31 elements. Needs 9 GiB."""
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        print("not run: a pool of 9 GiB (not enough free memory)", flush=True)
        return
    num_blocks = 131_200
    assert num_blocks * 16 * 8 * 128 > 2**31
    use_last_block(num_blocks, "cuda")


def use_last_block(num_blocks: int, device: str) -> None:
    """Write a sequence to the last block of a pool and attend to it there; no other block changes."""
    block_size, num_kv_heads, head_dim = 16, 8, 128
    kv = torch.zeros((2, num_blocks, block_size, num_kv_heads, head_dim), dtype=torch.bfloat16, device=device).unbind()
    batch = _one_block(num_blocks - 1, block_size, device)
    k, v = (torch.rand(block_size, num_kv_heads, head_dim, device=device).bfloat16() for _ in range(2))
    q = torch.rand(block_size, 2 * num_kv_heads, head_dim, device=device).bfloat16()
    no_rotation = torch.cat((torch.ones(16, 64), torch.zeros(16, 64)), dim=1).to(device)
    rope_and_write(q, k, v, no_rotation, batch.positions, kv, batch.slot_mapping)
    for plane, values in zip(kv, (k, v), strict=True):
        assert torch.equal(plane[-1], values)
        assert not plane[:-1].any()
    # q = 0 weighs all keys the same: the mean of the values so far
    out = prefill_attention(torch.zeros_like(q), kv, batch, 1.0)
    expected = v.float().cumsum(0) / torch.arange(1, 17, device=device)[:, None, None]
    torch.testing.assert_close(out.float(), expected.repeat_interleave(2, dim=1), rtol=0, atol=2e-2)


def _one_block(block_id: int, block_size: int, device: str) -> AttentionBatch:
    """A sequence that fills exactly one block."""
    positions = torch.arange(block_size, device=device)
    cu_seqlens_q, seq_lens, table = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, block_size], [block_size], [block_id])
    )
    return AttentionBatch(
        positions, block_id * block_size + positions, cu_seqlens_q, seq_lens, table[None], block_size, block_size
    )
