"""What sampling does over whole vocabularies, in one pass each and without a sort.

Kernels only narrow down: they find each row's best token and the tokens that may be drawn at all, with margins wider
than any rounding. The draw itself is `common.engine.sampling`'s, over the few tokens left, so it is the same token.
"""

import torch
import triton
import triton.language as tl

from common.engine.devices.triton.launch import jit, launch

TILE = 4096  # logits per program
PART = 128  # logits with one maximum of their own
NUM_BITS = 23  # of the hash that noise comes from, see common/engine/sampling/noise.py
ENTRY_TILE = 256
ENTRY_ALIGNMENT = 16


def row_best_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in torch."""
    finite = torch.where(logits.isnan(), float("inf"), logits)
    padded = torch.nn.functional.pad(finite, (0, -logits.shape[1] % TILE), value=float("-inf"))
    parts = padded.view(len(logits), padded.shape[1] // PART, PART)
    best = finite.amax(1)
    return best, (finite == best[:, None]).int().argmax(1), parts.amax(2)


@jit
def part_best_kernel(
    best_ptr: tl.tensor,  # [num_rows, NUM_PARTS] float32
    first_ptr: tl.tensor,  # [num_rows, NUM_PARTS] int32: the first token that has it
    logits_ptr: tl.tensor,  # [num_rows, VOCAB] float32, row stride given
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
) -> None:
    """grid: (NUM_PARTS / PARTS, num_rows). Best of each part; infinite where anything is not a number."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    token = part[:, None] * PART_SIZE + tl.arange(0, PART_SIZE)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < VOCAB, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, 1)
    first = tl.min(tl.where(logits == best[:, None], token, VOCAB), 1)
    tl.store(best_ptr + row * NUM_PARTS + part, best)
    tl.store(first_ptr + row * NUM_PARTS + part, first)


@jit
def merge_best_kernel(
    best_ptr: tl.tensor,  # [num_rows] float32
    token_ptr: tl.tensor,  # [num_rows] int64
    part_best_ptr: tl.tensor,  # [num_rows, NUM_PARTS] float32
    part_first_ptr: tl.tensor,  # [num_rows, NUM_PARTS] int32
    NUM_PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    VOCAB: tl.constexpr,
) -> None:
    """grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_TILE)
    mask = part < NUM_PARTS
    part_best = tl.load(part_best_ptr + row * NUM_PARTS + part, mask=mask, other=float("-inf"))
    first = tl.load(part_first_ptr + row * NUM_PARTS + part, mask=mask, other=VOCAB)
    best = tl.max(part_best, 0)
    token = tl.min(tl.where(part_best == best, first, VOCAB - 1), 0)
    tl.store(best_ptr + row, best)
    tl.store(token_ptr + row, token.to(tl.int64))


def row_best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(best logit, first token that has it, best of each part of PART tokens); +inf counts for what is not a number.

    Exact. logits: [num_rows, vocab_size] float32, rows contiguous.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, TILE) * (TILE // PART)
    part_best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    part_first = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    launch(
        part_best_kernel, (num_parts * PART // TILE, num_rows), logits.device,
        part_best, part_first, logits, logits.stride(0),
        VOCAB=vocab_size, NUM_PARTS=num_parts, PARTS=TILE // PART, PART_SIZE=PART, num_warps=8,
    )  # fmt: skip
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch(
        merge_best_kernel, (num_rows,), logits.device,
        best, token_ids, part_best, part_first,
        NUM_PARTS=num_parts, PARTS_TILE=triton.next_power_of_2(num_parts), VOCAB=vocab_size, num_warps=1,
    )  # fmt: skip
    return best, token_ids, part_best


@jit
def noise_bits(token: tl.tensor, key_low: tl.tensor, key_high: tl.tensor) -> tl.tensor:
    """The upper 23 bits of lowbias32 of a token id under a row's key, as in common/engine/sampling/noise.py."""
    bits = token.to(tl.uint32) * 0x9E3779B1 + key_low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = bits ^ key_high
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return (bits ^ (bits >> 16)) >> 9


@jit
def may_draw_kernel(
    may_ptr: tl.tensor,  # [num_drawn, VOCAB] int8
    logits_ptr: tl.tensor,  # [num_rows, VOCAB] float32, row stride given
    rows_ptr: tl.tensor,  # [num_drawn] int64
    floors_ptr: tl.tensor,  # [num_drawn] float32
    temperatures_ptr: tl.tensor,  # [num_drawn] float32; not read unless HAS_NOISE
    keys_ptr: tl.tensor,  # [2, num_drawn] int32; not read unless HAS_NOISE
    num_drawn: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
) -> None:
    """grid: (cdiv(VOCAB, TOKENS), num_drawn).

    Without noise: logit >= floor. With it: logit / temperature + noise may reach floor; noise(u) <= -log(1 - u),
    because -log(u) >= 1 - u, so a token with 1 - u > exp(logit / temperature - floor) can not.
    """
    drawn = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(rows_ptr + drawn).to(tl.int64)
    floor = tl.load(floors_ptr + drawn)
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < VOCAB, other=float("-inf"))
    if HAS_NOISE:
        key_low = tl.load(keys_ptr + drawn).to(tl.uint32, bitcast=True)
        key_high = tl.load(keys_ptr + num_drawn + drawn).to(tl.uint32, bitcast=True)
        bits = noise_bits(token, key_low, key_high).to(tl.int32)
        rest = (8388607.5 - bits.to(tl.float32)) * (1.0 / 8388608.0)
        distance = logits / tl.load(temperatures_ptr + drawn) - floor
        may = rest <= tl.exp(tl.minimum(distance, 80.0)) * 1.0001
    else:
        may = logits >= floor
    tl.store(may_ptr + drawn * VOCAB + token, may.to(tl.int8), mask=token < VOCAB)


def may_draw(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, rows contiguous
    rows: torch.Tensor,  # [num_drawn] int64
    floors: torch.Tensor,  # [num_drawn] float32
    temperatures: torch.Tensor | None = None,  # [num_drawn] float32
    keys: torch.Tensor | None = None,  # [2, num_drawn] int32: low and high half of each row's noise key
) -> torch.Tensor:
    """[num_drawn, vocab_size] bool: logit >= floor, or with `temperatures` and `keys` the same of the noisy sum.

    A superset of what exact arithmetic finds for floors lowered by 1e-3 + 4e-6 |floor|; no other bound is needed.
    """
    vocab_size = logits.shape[1]
    may = torch.empty((len(rows), vocab_size), dtype=torch.int8, device=logits.device)
    launch(
        may_draw_kernel, (triton.cdiv(vocab_size, TILE), len(rows)), logits.device,
        may, logits, rows, floors, floors if temperatures is None else temperatures, rows if keys is None else keys,
        len(rows), logits.stride(0),
        VOCAB=vocab_size, TOKENS=TILE, HAS_NOISE=keys is not None, num_warps=8,
    )  # fmt: skip
    return may.bool()


def may_draw_reference(logits: torch.Tensor, rows: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """Without noise, the same in torch. With noise the claim is one about draws, see tests."""
    return logits[rows] >= floors[:, None]


@jit
def adjust_kernel(
    logits_ptr: tl.tensor,  # [num_rows, VOCAB] float32, contiguous
    place_ptr: tl.tensor,  # [num_entries] int64: row * VOCAB + token, none twice; below 0: no entry
    values_ptr: tl.tensor,  # [4, num_entries] float32: repetition penalty, what is taken off, bias, 1 if forbidden
    num_entries: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    """grid: (cdiv(num_entries, ENTRIES),)."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    in_range = entry < num_entries
    place = tl.load(place_ptr + entry, mask=in_range, other=-1).to(tl.int64)
    mask = place >= 0
    repetition = tl.where(mask, tl.load(values_ptr + entry, mask=in_range, other=1.0), 1.0)
    taken_off = tl.load(values_ptr + num_entries + entry, mask=in_range, other=0.0)
    bias = tl.load(values_ptr + 2 * num_entries + entry, mask=in_range, other=0.0)
    is_forbidden = tl.load(values_ptr + 3 * num_entries + entry, mask=in_range, other=0.0) > 0.0
    logit = tl.load(logits_ptr + place, mask=mask, other=0.0)
    logit = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    logit = logit - taken_off + bias
    tl.store(logits_ptr + place, tl.where(is_forbidden, float("-inf"), logit), mask=mask)


def adjust_logits(logits: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """Penalties, bias and forbidden tokens, in place; shapes as in `adjust_kernel`. Exactly as the reference."""
    assert logits.is_contiguous()
    assert values.shape == (4, len(place))
    # to a multiple of what is loaded at once
    padding = (0, -len(place) % ENTRY_ALIGNMENT)
    place, values = torch.nn.functional.pad(place, padding, value=-1), torch.nn.functional.pad(values, padding)
    launch(
        adjust_kernel, (triton.cdiv(len(place), ENTRY_TILE),), logits.device,
        logits, place, values, len(place), ENTRIES=ENTRY_TILE, num_warps=1,
        enable_fp_fusion=False,  # a fused multiply and subtract rounds once, where torch rounds twice
    )  # fmt: skip


def adjust_logits_reference(logits: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """The same in torch."""
    repetition, taken_off, bias, forbidden = values
    rows = logits.view(-1)
    before = rows[place]
    after = torch.where(before > 0, before / repetition, before * repetition) - taken_off + bias
    rows[place] = after.masked_fill(forbidden > 0, float("-inf"))
