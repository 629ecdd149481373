"""Real sessions on loopback: gRPC control, gloo payloads, two caches."""

import torch

from kvtransfer.events import Outcome
from tests.kvtransfer.cluster import FIRST, new_transfer_id, pair, request_rows, rows_of


async def test_a_request_ships_layer_by_layer_into_blocks_of_another_size() -> None:
    async with pair() as cluster:
        transfer_id, num_tokens = new_transfer_id("r1"), 100
        source_table, target_table = (5, 3, 9, 1, 7, 11, 2), (4, 0, 6, 3)
        rows = request_rows(1, num_tokens)
        cluster.decode.expect(transfer_id, target_table, num_tokens)
        cluster.prefill.start(transfer_id, cluster.address, source_table, num_tokens)
        await cluster.prefill.compute(transfer_id, source_table, rows, step=24)
        assert await cluster.until_ended(transfer_id) is Outcome.DONE
        received = cluster.decode.received[transfer_id]
        assert received.tokens == FIRST
        assert 0 <= received.exposed_s <= received.transfer_s
        torch.testing.assert_close(rows_of(cluster.decode.kv, target_table, num_tokens), rows, rtol=0, atol=0)
