"""The kernels of latents against their float64 references, unused slots poisoned throughout."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.engine.devices.triton.decode_attention import SPLIT_LEN
from common.engine.devices.triton.latent_attention import (
    latent_attention_reference,
    latent_decode_attention,
    latent_prefill_attention,
)
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.latent_checks import latent_case
from tests.common.engine.devices.triton.pairwise import Case, case_id
from tests.common.engine.devices.triton.test_attention import only

SMALL: Case = {"rank": 32, "tail": 8, "num_heads": 4, "block_size": 16, "dtype": torch.float32, "poison": float("nan")}


@pytest.mark.parametrize("case", GRIDS["latent_prefill"].cases, ids=case_id)
def test_prefill_matches_float64_reference(case: Case) -> None:
    GRIDS["latent_prefill"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["latent_decode"].cases, ids=case_id)
def test_decode_matches_float64_reference(case: Case) -> None:
    GRIDS["latent_decode"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["latent_write"].cases, ids=case_id)
def test_rotation_and_write_match_float64_reference(case: Case) -> None:
    GRIDS["latent_write"].check(case, "cpu")


def test_prefill_of_more_heads_than_a_tile_has_rows() -> None:
    case = latent_case(((40, 9), (3, 3)), SMALL | {"num_heads": 130})
    parts = (case.q, case.kv, case.batch, case.scale, SMALL["rank"])
    expected = latent_attention_reference(*parts)
    torch.testing.assert_close(latent_prefill_attention(*parts).double(), expected, rtol=0, atol=1e-5)


def test_decode_of_empty_sequence_is_zero() -> None:
    case = latent_case(((0, 1), (3, 1)), SMALL)
    out = latent_decode_attention(case.q, case.kv, case.batch, case.scale, SMALL["rank"])
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()


def test_decode_of_a_sequence_does_not_depend_on_its_batch() -> None:
    lengths = ((SPLIT_LEN + 44, 1), (7, 1), (3 * SPLIT_LEN, 1))
    case = latent_case(lengths, SMALL | {"dtype": torch.bfloat16})
    together = latent_decode_attention(case.q, case.kv, case.batch, case.scale, SMALL["rank"])
    for idx, (seq_len, _) in enumerate(lengths):
        alone = replace(case, q=case.q[idx : idx + 1], batch=only(case, idx, seq_len))
        found = latent_decode_attention(alone.q, alone.kv, alone.batch, alone.scale, SMALL["rank"])
        assert torch.equal(found[0], together[idx])


@pytest.mark.parametrize("kernel", (latent_prefill_attention, latent_decode_attention))
def test_result_does_not_depend_on_the_order_of_programs(kernel: Any, run_in_order: Any) -> None:
    case = latent_case(((600, 1), (17, 1), (129, 1)), SMALL)
    natural = kernel(case.q, case.kv, case.batch, case.scale, SMALL["rank"])
    for order in (lambda n: list(reversed(range(n))), lambda n: random.Random(1).sample(range(n), n)):
        run_in_order(order)
        assert torch.equal(kernel(case.q, case.kv, case.batch, case.scale, SMALL["rank"]), natural)
