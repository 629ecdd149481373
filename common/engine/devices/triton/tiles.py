"""Device helpers that several kernels share: paged addresses, masks and the online softmax of one tile.

Every offset that a block id or a token takes part in is int64: a pool larger than 2**31 elements is ordinary.
"""

import triton.language as tl

from common.engine.devices.triton.launch import is_interpreted, jit

# triton 3.9's interpreter multiplies bfloat16 operands of a dot as the integers that it stores them in.
UPCAST_DOT = tl.constexpr(is_interpreted())

LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def paged_slots(
    block_table_ptr: tl.tensor,  # [max_blocks] int32: of one sequence
    positions: tl.tensor,
    mask: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The slot (block_id * BLOCK_SIZE + offset) of each position, int64."""
    block_id = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=mask, other=0)
    return block_id.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


@jit
def dot(lhs: tl.tensor, rhs: tl.tensor) -> tl.tensor:
    """Matrix product with float32 accumulation; float32 operands are not rounded to tf32."""
    if UPCAST_DOT:
        lhs = lhs.to(tl.float32)
        rhs = rhs.to(tl.float32)
    return tl.dot(lhs, rhs, input_precision="ieee")


@jit
def scaled_scores(
    query: tl.tensor,  # [M, D]
    key: tl.tensor,  # [N, D]
    scale: tl.tensor,  # a number, or [1, N] where keys have scales of their own
    SOFT_CAP: tl.constexpr,
) -> tl.tensor:
    """Scores in units of log2, so that the softmax uses exp2. SOFT_CAP 0 is none."""
    scores = dot(query, tl.trans(key)) * scale
    if SOFT_CAP > 0:
        # tanh |x| = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), which never overflows
        decay = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP) * LOG2_E)
        capped = SOFT_CAP * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    return scores * LOG2_E


@jit
def is_visible(query_pos: tl.tensor, key_pos: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Causal mask [M, N]; with WINDOW > 0 a query sees itself and the WINDOW - 1 tokens before it."""
    visible = key_pos[None, :] <= query_pos[:, None]
    if WINDOW > 0:
        visible = visible & (key_pos[None, :] > query_pos[:, None] - WINDOW)
    return visible


@jit
def online_softmax(
    scores: tl.tensor,  # [M, N]: -inf where hidden
    value: tl.tensor,  # [N, D]: finite everywhere, also where hidden
    value_scale: tl.tensor,  # [N]: what the values of a quantized cache must be multiplied with
    acc: tl.tensor,  # [M, D] float32
    row_max: tl.tensor,  # [M]
    row_sum: tl.tensor,  # [M]
    IS_SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take one tile into a running softmax (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1)."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if IS_SCALED:
        weights = weights * value_scale[None, :]
    acc = acc * rescale[:, None] + dot(weights.to(value.dtype), value)
    return acc, new_max, row_sum


@jit
def start_with_sinks(sinks_ptr: tl.tensor, head: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Greatest score and sum of a running softmax that has seen each head's sink and no key yet."""
    sinks = tl.load(sinks_ptr + head, mask=mask, other=0.0) * LOG2_E
    return sinks, tl.full(sinks.shape, 1.0, tl.float32)


@jit
def normalized(acc: tl.tensor, row_sum: tl.tensor) -> tl.tensor:
    """Softmax-weighted mean; zero for a row that saw no key."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
