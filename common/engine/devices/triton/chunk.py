"""Gather rows of a plane of the KV cache for the wire, and scatter them: copies, blind to what the bytes mean."""

import torch
import triton
import triton.language as tl

from common.engine.devices.triton.launch import jit, launch

TOKEN_TILE = 16
WORD_TILE = 256  # 4-byte words of a row per program


def gather_rows_reference(plane: torch.Tensor, slots: torch.Tensor, columns: slice, part: torch.Tensor) -> None:
    part.copy_(plane[:, slots, columns])


def scatter_rows_reference(plane: torch.Tensor, slots: torch.Tensor, columns: slice, part: torch.Tensor) -> None:
    plane[:, slots, columns] = part


@jit
def copy_rows_kernel(
    plane_ptr: tl.tensor,  # [num_layers, num_slots, ROW_WORDS] int32, from the first word to copy on
    part_ptr: tl.tensor,  # [num_layers, num_tokens, PART_WORDS] int32
    slots_ptr: tl.tensor,  # [num_tokens] int64
    num_tokens: tl.tensor,
    num_slots: tl.tensor,
    ROW_WORDS: tl.constexpr,
    PART_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_GATHER: tl.constexpr,
) -> None:
    """grid: (cdiv(num_tokens, TOKENS), num_layers, cdiv(PART_WORDS, WORDS))."""
    layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=0).to(tl.int64)
    in_plane = plane_ptr + ((layer * num_slots + slot) * ROW_WORDS)[:, None] + word[None, :]
    in_part = part_ptr + ((layer * num_tokens + token) * PART_WORDS)[:, None] + word[None, :]
    mask = (token < num_tokens)[:, None] & (word < PART_WORDS)[None, :]
    if IS_GATHER:
        tl.store(in_part, tl.load(in_plane, mask=mask, other=0), mask=mask)
    else:
        tl.store(in_plane, tl.load(in_part, mask=mask, other=0), mask=mask)


def gather_rows(plane: torch.Tensor, slots: torch.Tensor, columns: slice, part: torch.Tensor) -> None:
    """Copy bytes `columns` of the rows of `slots` into `part`. Bits equal the reference's.

    plane: [num_layers, num_slots, row_bytes] uint8; slots: [num_tokens] int64; part: [num_layers, num_tokens,
    bytes of columns] uint8; all contiguous, on the plane's device, and of multiples of 4 bytes.
    """
    _copy_rows(plane, slots, columns, part, is_gather=True)


def scatter_rows(plane: torch.Tensor, slots: torch.Tensor, columns: slice, part: torch.Tensor) -> None:
    """Inverse of `gather_rows`, no slot twice. Shapes as there."""
    _copy_rows(plane, slots, columns, part, is_gather=False)


def _copy_rows(
    plane: torch.Tensor, slots: torch.Tensor, columns: slice, part: torch.Tensor, *, is_gather: bool
) -> None:
    num_layers, num_slots, row_bytes = plane.shape
    assert 0 <= columns.start < columns.stop <= row_bytes
    assert part.shape == (num_layers, slots.shape[0], columns.stop - columns.start)
    assert plane.is_contiguous()
    assert part.is_contiguous()
    assert row_bytes % 4 == columns.start % 4 == columns.stop % 4 == 0
    part_words = part.shape[2] // 4
    words = min(WORD_TILE, triton.next_power_of_2(part_words))
    grid = (triton.cdiv(slots.shape[0], TOKEN_TILE), num_layers, triton.cdiv(part_words, words))
    launch(
        copy_rows_kernel, grid, plane.device,
        _as_words(plane)[columns.start // 4 :], _as_words(part), slots, slots.shape[0], num_slots,
        ROW_WORDS=row_bytes // 4, PART_WORDS=part_words, TOKENS=TOKEN_TILE, WORDS=words, IS_GATHER=is_gather,
        num_warps=max(1, min(4, TOKEN_TILE * words // 256)),  # 4 words per thread and load, at 64 threads a warp
    )  # fmt: skip


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
