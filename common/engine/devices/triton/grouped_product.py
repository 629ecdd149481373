"""Products of rows with the weights of their experts, all experts in one launch (MegaBlocks, Gale et al. 2022).

A pair is a row and one of its experts: pair p is row p // num_active. Pairs are sorted by expert and cut into tiles of
one expert each, so that a program reads the weights of one expert only, and those that nobody chose are never read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.devices.triton.launch import jit, launch
from common.engine.devices.triton.silu_mul import silu_mul
from common.engine.devices.triton.tiles import dot

FEW_PAIRS, MANY_PAIRS = 16, 64  # of a tile
OUT_TILE = 64


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Which pairs each tile takes. Built on the rows' device, without waiting for it. Integers are int32."""

    order: torch.Tensor  # [num_pairs]: the pairs by expert
    tile_experts: torch.Tensor  # [num_tiles]: num_experts where a tile has nothing to do
    tile_firsts: torch.Tensor  # [num_tiles]: where in `order` a tile begins
    expert_ends: torch.Tensor  # [num_experts]: where in `order` an expert's pairs end
    tile_size: int


def sort_pairs(expert_ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """expert_ids: [num_rows, num_active] int64"""
    flat = expert_ids.flatten()
    tile_size = MANY_PAIRS if flat.shape[0] >= MANY_PAIRS // 2 * num_experts else FEW_PAIRS
    num_tiles = flat.shape[0] // tile_size + min(num_experts, flat.shape[0])  # no more, however they fall
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    ends, tile_ends = counts.cumsum(0), ((counts + tile_size - 1) // tile_size).cumsum(0)
    tiles = torch.arange(num_tiles, device=flat.device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    of_tile = experts.clamp(max=num_experts - 1)
    tile_starts = tile_ends[of_tile] - (counts[of_tile] + tile_size - 1) // tile_size
    firsts = (ends - counts)[of_tile] + (tiles - tile_starts) * tile_size
    order = flat.argsort(stable=True)
    return SortedPairs(order.int(), experts.int(), firsts.int(), ends.int(), tile_size)


def grouped_product_reference(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, *, is_by_row: bool
) -> torch.Tensor:
    """The same in float64, pair by pair."""
    num_active = expert_ids.shape[1]
    rows = x.repeat_interleave(num_active, 0) if is_by_row else x
    return torch.einsum("pi,poi->po", rows.double(), weights.double()[expert_ids.flatten()]).to(x.dtype)


@jit
def grouped_product_kernel(
    out_ptr: tl.tensor,  # [num_pairs, NUM_OUT], contiguous
    x_ptr: tl.tensor,  # [num_pairs / DIVISOR, NUM_IN], contiguous
    weights_ptr: tl.tensor,  # [NUM_EXPERTS, NUM_OUT, NUM_IN], contiguous
    order_ptr: tl.tensor,  # [num_pairs] int32
    tile_experts_ptr: tl.tensor,  # [num_tiles] int32
    tile_firsts_ptr: tl.tensor,  # [num_tiles] int32
    expert_ends_ptr: tl.tensor,  # [NUM_EXPERTS] int32
    NUM_EXPERTS: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    DIVISOR: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
) -> None:
    """grid: (num_tiles, cdiv(NUM_OUT, OUT_TILE))."""
    expert = tl.load(tile_experts_ptr + tl.program_id(0))
    if expert >= NUM_EXPERTS:
        return
    place = tl.load(tile_firsts_ptr + tl.program_id(0)) + tl.arange(0, PAIR_TILE)
    is_pair = place < tl.load(expert_ends_ptr + expert)
    pair = tl.load(order_ptr + place, mask=is_pair, other=0).to(tl.int64)
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    is_out = out < NUM_OUT
    column = tl.arange(0, IN_TILE)
    x_ptrs = x_ptr + (pair // DIVISOR)[:, None] * NUM_IN + column[None, :]
    weight_ptrs = weights_ptr + (expert.to(tl.int64) * NUM_OUT + out)[:, None] * NUM_IN + column[None, :]
    sums = tl.zeros((PAIR_TILE, OUT_TILE), dtype=tl.float32)
    for start in range(0, NUM_IN, IN_TILE):
        is_in = start + column < NUM_IN
        x = tl.load(x_ptrs + start, mask=is_pair[:, None] & is_in[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_out[:, None] & is_in[None, :], other=0.0)
        sums += dot(x, tl.trans(weight))
    target = out_ptr + pair[:, None] * NUM_OUT + out[None, :]
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & is_out[None, :])


def grouped_product(
    x: torch.Tensor,  # [num_rows, num_in] by row, else [num_pairs, num_in]; contiguous
    weights: torch.Tensor,  # [num_experts, num_out, num_in], contiguous
    pairs: SortedPairs,
    *,
    is_by_row: bool,
) -> torch.Tensor:
    """[num_pairs, num_out], new: each pair's row times its expert's weights, summed in float32."""
    assert x.is_contiguous()
    assert weights.is_contiguous()
    num_experts, num_out, num_in = weights.shape
    num_pairs = pairs.order.shape[0]
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    launch(
        grouped_product_kernel, (pairs.tile_experts.shape[0], triton.cdiv(num_out, OUT_TILE)), x.device,
        out, x, weights, pairs.order, pairs.tile_experts, pairs.tile_firsts, pairs.expert_ends,
        NUM_EXPERTS=num_experts, NUM_OUT=num_out, NUM_IN=num_in,
        DIVISOR=num_pairs // x.shape[0] if is_by_row and num_pairs else 1,
        PAIR_TILE=pairs.tile_size, OUT_TILE=OUT_TILE, IN_TILE=32 if x.dtype == torch.float32 else 64, num_warps=4,
    )  # fmt: skip
    return out


class TritonExperts:
    """`GroupedMlp.apply` with silu: four launches, whatever the number of experts, and nothing that waits."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """gate_up: [num_experts, 2 * size, hidden_size], gate first; down: [num_experts, hidden_size, size]"""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        pairs = sort_pairs(expert_ids, self._gate_up.shape[0])
        inner = silu_mul(*grouped_product(x, self._gate_up, pairs, is_by_row=True).chunk(2, dim=-1))
        results = grouped_product(inner, self._down, pairs, is_by_row=False)
        weighted = results.view(*expert_ids.shape, x.shape[1]).float() * expert_weights[..., None]
        return weighted.sum(1).to(x.dtype)
