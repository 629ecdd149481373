"""TritonAttention as the model sees it: chunked prefill, then decode, equals attention over the whole sequence."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from common.checkpoint.layers import AttentionOptions
from common.engine.contract.attention import AttentionBackend, AttentionBatch
from common.engine.devices.triton.attention_reference import attend_reference
from common.engine.devices.triton.device import TritonAttention
from common.engine.devices.triton.rope_write import rope_and_write_reference
from common.engine.devices.triton.silu_mul import silu_mul, silu_mul_reference

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 16, 6, 2, 16
TOTAL = 45


def step(block_table: torch.Tensor, start: int, end: int) -> AttentionBatch:
    positions = torch.arange(start, end)
    return AttentionBatch(
        positions=positions,
        slot_mapping=block_table[0].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=block_table,
        max_query_len=end - start,
        max_seq_len=end,
    )


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The sequence in one piece, cache contiguous."""
    kv = tuple(torch.zeros(2, 3, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    rotated = rope_and_write_reference(q, k, v, cos_sin, torch.arange(TOTAL), kv, torch.arange(TOTAL))
    key, value = (plane.flatten(0, 1)[:TOTAL] for plane in kv)
    return attend_reference(rotated, key, value, HEAD_DIM**-0.5)


@pytest.mark.parametrize("bounds", ((0, 45), (0, 16, 44, 45), (0, 1, 2, 40, 41, 42, 43, 44, 45)))
def test_steps_over_paged_cache_equal_whole_sequence(bounds: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(TOTAL, heads, HEAD_DIM, generator=generator) for heads in (NUM_HEADS, 2, 2))
    cos_sin = torch.rand(64, HEAD_DIM, generator=generator)
    block_table = torch.tensor([[4, 0, 2, 0]], dtype=torch.int32)
    kv = tuple(torch.full((2, 6, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan")))
    backend: AttentionBackend = TritonAttention()
    outs = []
    for start, end in pairwise(bounds):
        batch = step(block_table, start, end)
        rotated = backend.rope_and_write(q[start:end], k[start:end], v[start:end], cos_sin, kv, batch)
        outs.append(backend.attend(rotated, kv, batch, AttentionOptions(HEAD_DIM**-0.5)))
    torch.testing.assert_close(torch.cat(outs).double(), whole(q, k, v, cos_sin), rtol=0, atol=1e-5)


def test_launches_from_several_threads_do_not_mix() -> None:
    """A link's thread packs while the step computes; the interpreter itself has one global grid position."""
    inputs = [torch.randn(24, 40, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda x: silu_mul(x, x), inputs))
    for x, out in zip(inputs, outs, strict=True):
        torch.testing.assert_close(out, silu_mul_reference(x, x))


def test_without_gpu_and_interpreter_the_backend_says_what_to_do() -> None:
    """In a process of its own, also the proof that importing the kernels needs neither."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "from common.engine.devices.triton.device import TritonAttention; TritonAttention()"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "RuntimeError: triton kernels need a GPU" in result.stderr
    assert "TRITON_INTERPRET=1" in result.stderr


def test_interpreter_does_not_leak_into_child_processes() -> None:
    assert "TRITON_INTERPRET" not in os.environ or os.environ["TRITON_INTERPRET"] != "1"
