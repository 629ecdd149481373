"""The compiler's view of the kernels, on a few of them; `make aot` looks at all."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()  # the first import of triton in a test process decides for all

from tests.tools.kernel_compile import Facts  # noqa: E402
from tests.tools.kernel_table import WIDE_MATRIX, faults  # noqa: E402

GOOD = Facts("prefill_attention_kernel", "sm_90", 100, 50_000, 0, (4, 16), "wgmma.mma_async")
BAD = (
    (replace(GOOD, spilled=8), "spills 8"),
    (replace(GOOD, load_bytes=(4, 8)), "widest load is 8 bytes"),
    (replace(GOOD, load_bytes=(2, 16)), "loads 2 bytes at a time"),
    (replace(GOOD, matrix="mma.sync"), "no wgmma.mma_async"),
    (replace(GOOD, shared_bytes=300_000), "needs 300000 bytes of shared memory"),
)


def compiled(*command: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: here the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(("facts", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_fault_is_named(facts: Facts, fault: str) -> None:
    assert faults(GOOD, WIDE_MATRIX) == []
    assert faults(facts, WIDE_MATRIX) == [fault]


def test_kernels_of_head_dim_128_compile_without_fault_for_sm_90_and_gfx942() -> None:
    targets = ("--target", "sm_90", "--target", "gfx942")
    result = compiled("-m", "tests.tools.kernel_table", *targets, "--case", "bf16 d128")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "18 kernels compiled, 0 with faults" in result.stdout
    assert "wgmma.mma_async" in result.stdout
    assert "v_mfma" in result.stdout


def test_tiles_too_large_for_the_registers_are_a_fault() -> None:
    """The whole path sees a spill when there is one: 4 warps hold 128 x 64 products of head_dim 64 on sm_80."""
    code = """
import sys
from common.engine.devices.triton import prefill_attention
from tests.tools import kernel_table
prefill_attention.prefill_tiles = lambda *_: prefill_attention.PrefillTiles(128, 64, 4, 3)
sys.argv = ["kernel_table", "--target", "sm_80", "--case", "prefill bf16 d64"]
sys.exit(kernel_table.main())
"""
    result = compiled("-c", code)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "spills" in result.stdout
