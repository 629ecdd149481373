"""The kernels of latents held to their references, as `checks` has it for the others."""

from collections.abc import Sequence
from typing import Any

import torch

from common.engine.devices.triton.latent_attention import (
    latent_attention_reference,
    latent_decode_attention,
    latent_prefill_attention,
)
from common.engine.devices.triton.latent_write import rope_and_write_latent, rope_and_write_latent_reference
from tests.common.engine.devices.triton.cases import ATTENTION_BOUND, ROUNDING_BOUND, AttentionCase, Shape, angles
from tests.common.engine.devices.triton.cases import attention_case as case_of_heads
from tests.common.engine.devices.triton.pairwise import Case

LATENT_AXES: dict[str, tuple[Any, ...]] = {
    "rank": (16, 24, 512),
    "tail": (8, 12, 64),
    "num_heads": (1, 3, 20),
    "block_size": (16, 8, 24),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "poison": (float("nan"), float("inf")),
}
LATENT_WRITE_AXES: dict[str, tuple[Any, ...]] = {
    "num_tokens": (0, 1, 15, 16, 17, 33),
    **{name: LATENT_AXES[name] for name in ("rank", "tail", "num_heads", "dtype")},
    "is_sliced": (False, True),
}


def latent_case(lengths: Sequence[tuple[int, int]], case: Case, device: str = "cpu") -> AttentionCase:
    """Blocks in random order; what is unused holds poison."""
    size = case["rank"] + case["tail"]
    shape = Shape(size, 1, case["num_heads"], case["block_size"], case["dtype"], poison=case["poison"], device=device)
    found = case_of_heads(lengths, shape)
    return AttentionCase(found.q.contiguous(), (found.kv[0].flatten(2),), found.batch, found.scale)


def check_latent_prefill(case: Case, device: str) -> None:
    _compare(latent_prefill_attention, case, device)


def check_latent_decode(case: Case, device: str) -> None:
    _compare(latent_decode_attention, case, device)


def _compare(kernel: Any, case: Case, device: str) -> None:
    inputs = latent_case(case["batch"], case, device)
    parts = (inputs.q, inputs.kv, inputs.batch, inputs.scale, case["rank"])
    out = kernel(*parts)
    assert (out.dtype, out.shape) == (case["dtype"], (*inputs.q.shape[:2], case["rank"]))
    assert out.isfinite().all()
    expected = latent_attention_reference(*parts)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATTENTION_BOUND[case["dtype"]])


def check_latent_write(case: Case, device: str) -> None:
    """The whole cache is compared: -3 marks a slot that nobody wrote, as that of each fourth token."""
    num_tokens, rank, tail = case["num_tokens"], case["rank"], case["tail"]
    generator = torch.Generator().manual_seed(1)
    latent = (2 * torch.rand(num_tokens, rank + tail, generator=generator) - 1).to(case["dtype"]).to(device)
    heads = 2 * torch.rand(num_tokens, case["num_heads"], 5 + tail, generator=generator) - 1
    q = heads.to(case["dtype"]).to(device)[..., 5:]
    q = q if case["is_sliced"] else q.contiguous()
    slots = torch.randperm(9 * 16, generator=generator)[:num_tokens]
    slots[3::4] = -1
    positions = torch.randint(200, (num_tokens,), generator=generator).to(device)
    planes = [torch.full((9, 16, rank + tail), -3.0, dtype=case["dtype"], device=device) for _ in range(2)]
    cos_sin = angles(tail).to(device)
    found = rope_and_write_latent(q, latent, cos_sin, positions, (planes[0],), slots.to(device))
    expected = rope_and_write_latent_reference(q, latent, cos_sin, positions, (planes[1],), slots.to(device))
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    torch.testing.assert_close(planes[0], planes[1], rtol=0, atol=bound)
    assert torch.equal(planes[0][..., :rank], planes[1][..., :rank])
