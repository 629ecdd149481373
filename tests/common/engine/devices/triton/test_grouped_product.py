"""Products with the weights of experts against their reference, and a whole mixture against torch's."""

from collections.abc import Callable

import pytest
import torch

from common.engine.contract.device import Linear, Mlp
from common.engine.contract.elementwise import TorchElementwise
from common.engine.contract.experts import TorchExperts
from common.engine.devices.triton.grouped_product import TritonExperts, sort_pairs
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.conftest import GridOrder
from tests.common.engine.devices.triton.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["grouped_product"].cases, ids=case_id)
def test_grouped_product_matches_reference(case: Case) -> None:
    GRIDS["grouped_product"].check(case, "cpu")


def test_every_pair_is_in_one_tile_of_its_own_expert() -> None:
    expert_ids = torch.randint(0, 9, (70, 3), generator=torch.Generator().manual_seed(1))
    pairs = sort_pairs(expert_ids, 10)
    seen = []
    for expert, first in zip(pairs.tile_experts.tolist(), pairs.tile_firsts.tolist(), strict=True):
        if expert == 10:
            continue
        of_tile = pairs.order[first : min(first + pairs.tile_size, int(pairs.expert_ends[expert]))].tolist()
        assert of_tile
        assert set(expert_ids.flatten()[of_tile].tolist()) == {expert}
        seen += of_tile
    assert sorted(seen) == list(range(210))


def test_a_mixture_is_torchs_in_any_order_of_programs(run_in_order: Callable[[GridOrder], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn((6, 64, 48), generator=generator) / 7
    down = torch.randn((6, 48, 32), generator=generator) / 6
    x, scores = (torch.randn((19, size), generator=generator) for size in (48, 6))
    weights, expert_ids = scores.softmax(-1).topk(2)
    mlps = [Mlp(_linear(first), _linear(second)) for first, second in zip(gate_up, down, strict=True)]
    expected = TorchExperts(mlps, TorchElementwise().silu_mul)(x, expert_ids, weights)
    run_in_order(lambda size: list(reversed(range(size))))
    found = TritonExperts(gate_up, down)(x, expert_ids, weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def _linear(weight: torch.Tensor) -> Linear:
    return Linear(weight.shape[1], weight.shape[0], lambda x: x @ weight.T)
