"""Sums and gathers over ranks, in memory that they share."""

import pytest
import torch

from common.engine.contract.collectives import RankLost
from common.engine.executor.collectives import SharedCollectives
from tests.ranks import new_collectives, on_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_every_rank_gets_the_same_sum_in_one_piece_or_in_several(num_ranks: int, num_rows: int) -> None:
    parts = [torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    sums = on_ranks(new_collectives(num_ranks), lambda own: own.all_reduce(parts[own.rank.rank].clone()))
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0))
    assert all(torch.equal(sums[0], other) for other in sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_that_follow_each_other_do_not_mix(dtype: torch.dtype) -> None:
    """Each rank is as slow as it likes; a value of another call would show in the sum."""

    def work(own: SharedCollectives) -> list[float]:
        rank = own.rank.rank
        return [
            own.all_reduce(torch.full((2, 8), float(call * 4 + rank), dtype=dtype))[1, 7].item() for call in range(20)
        ]

    assert on_ranks(new_collectives(3), work) == [[call * 12 + 3.0 for call in range(20)]] * 3


@pytest.mark.parametrize("num_rows", [1, 200])
def test_rank_0_gets_the_columns_of_all_in_their_order(num_rows: int) -> None:
    whole = torch.randn(num_rows, 100)
    parts = whole.split([30, 30, 40], dim=1)
    found = on_ranks(new_collectives(3), lambda own: own.gather(parts[own.rank.rank], [30, 30, 40]))
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], parts[1])


def test_a_rank_that_is_gone_is_found_by_those_that_wait_for_it() -> None:
    collectives = new_collectives(3)

    def work(own: SharedCollectives) -> object:
        if own.rank.rank == 2:
            own.close()
            return None
        with pytest.raises(RankLost):
            own.all_reduce(torch.ones(1, 4))
        return own.close()

    assert on_ranks(collectives, work) == [None] * 3
