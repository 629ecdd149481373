"""Offsets into the cache are 64-bit: by value in the helper, by a lint over every kernel's source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton.language as tl

import common.engine.devices.triton
from common.engine.devices.triton.launch import jit, launch
from common.engine.devices.triton.tiles import paged_slots

SOURCES = sorted(Path(common.engine.devices.triton.__file__).parent.glob("*.py"))
# What a row index is multiplied with on its way to an offset.
STRIDES = {
    "BLOCK_SIZE",
    "NUM_KV_HEADS",
    "HEAD_DIM",
    "ROW_WORDS",
    "HIDDEN",
    "SIZE",
    "num_slots",
    "num_tokens",
    "PART_WORDS",
}
# Indices that stay small: a head index times a head's stride is below one row of the cache.
SMALL = {"head", "kv_head", "member", "row", "num_tiles"}


def narrow_products(source: str) -> list[str]:
    """Products of a kernel with a stride whose other side is not known to be 64-bit."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and "jit" in map(ast.unparse, function.decorator_list)
        for node in _products_with_stride(function)
        if not _is_wide(node, _wide_names(function))
    ]


def _products_with_stride(function: ast.FunctionDef) -> Iterator[ast.BinOp]:
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            names = {name for side in (node.left, node.right) if isinstance(side, ast.Name) for name in [side.id]}
            if any(name in STRIDES or name.endswith("_stride") for name in names) and not _is_small(node):
                yield node


def _is_small(node: ast.BinOp) -> bool:
    """Only constants of the launch, and indices below one row of the cache."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return all(n in SMALL or n.isupper() or n.endswith("_head_stride") for n in names)


def _is_wide(node: ast.BinOp, wide_names: set[str]) -> bool:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return ".to(tl.int64)" in ast.unparse(node) or bool(names & wide_names)


def _wide_names(function: ast.FunctionDef) -> set[str]:
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    targets = {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    return {name for name, value in targets.items() if ".to(tl.int64)" in ast.unparse(value)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_offset_is_64_bit(path: Path) -> None:
    assert narrow_products(path.read_text()) == []


@pytest.mark.parametrize("name", ("kv_layout", "prefill_attention", "decode_attention", "rope_write", "chunk", "norm"))
def test_lint_sees_a_cast_that_is_dropped(name: str) -> None:
    source = next(path for path in SOURCES if path.stem == name).read_text()
    assert narrow_products(source.replace(".to(tl.int64)", "")) != []


@jit
def rows_kernel(out_ptr: tl.tensor, block_table_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    position = tl.arange(0, COUNT)
    tl.store(out_ptr + position, paged_slots(block_table_ptr, position, position >= 0, 16) * (8 * 256))


def test_paged_slots_beyond_31_bits_are_exact() -> None:
    """Block 70000 of a stride of 16 * 8 * 256 = 32768 elements starts beyond 2**31."""
    out = torch.zeros(32, dtype=torch.int64)
    launch(rows_kernel, (1,), out.device, out, torch.tensor([70_000, 3], dtype=torch.int32), COUNT=32)
    assert out[0] == 2_293_760_000
    assert out[15] == 2_293_760_000 + 15 * 8 * 256
    assert out[16] == 3 * 32768
