"""Planted faults on a real session: each is detected, and the pair works afterwards."""

import pytest
import torch

from common.ids import TransferId
from kvtransfer.codec import ChunkCodec
from kvtransfer.events import (
    Chunk,
    Outcome,
)
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import Done
from kvtransfer.plan import HEADER_BYTES
from tests.kvtransfer.cluster import (
    check_works,
    pair,
    ship,
)

# ---- planted faults -------------------------------------------------------------------------------------


def plant_in_pack(monkeypatch: pytest.MonkeyPatch, name: str, position: int) -> list[int]:
    """Flip a bit of the second chunk of request `name` after it was sealed; returns where it happened."""
    genuine, planted = ChunkCodec.pack, []

    def pack(
        self: ChunkCodec, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor
    ) -> None:
        genuine(self, transfer_id, chunk, block_table, buffer)
        if transfer_id.attempt_id.request_id == name and chunk.seq == 1:
            buffer[position] ^= 1
            planted.append(chunk.seq)

    monkeypatch.setattr(ChunkCodec, "pack", pack)
    return planted


@pytest.mark.parametrize(("position", "named"), [(HEADER_BYTES + 77, "expected digest"), (30, "expected transfer")])
async def test_a_flipped_bit_is_refused_and_the_pair_goes_on(
    monkeypatch: pytest.MonkeyPatch, position: int, named: str
) -> None:
    planted = plant_in_pack(monkeypatch, "flipped", position)
    async with pair() as cluster:
        transfer_id = await ship(cluster, "flipped")
        assert await cluster.until_ended(transfer_id) is Outcome.CANCELLED
        assert planted == [1]
        assert named in cluster.decode.failed[transfer_id].reason
        assert named in cluster.prefill.ended[transfer_id].reason
        await check_works(cluster)
        assert not cluster.prefill.lost


@pytest.mark.parametrize("difference", [-2048, -8, 8, 4096])
async def test_a_message_of_another_length_is_refused_and_the_process_lives(
    monkeypatch: pytest.MonkeyPatch, difference: int
) -> None:
    genuine, planted = ProcessGroupLink.send, []

    def send(self: ProcessGroupLink, buffer: torch.Tensor, done: Done) -> None:
        if not planted:
            planted.append(difference)
            num_bytes = buffer.numel()
            buffer = buffer.as_strided((num_bytes + difference,), (1,))
            buffer[num_bytes:] = 17
        genuine(self, buffer, done)

    monkeypatch.setattr(ProcessGroupLink, "send", send)
    async with pair() as cluster:
        # A seed of its own: memory that held the same request before would complete a short message rightly.
        transfer_id = await ship(cluster, "odd", seed=10_000 + difference)
        assert await cluster.until_ended(transfer_id) is Outcome.CANCELLED
        assert planted == [difference]
        await check_works(cluster)
        assert not cluster.prefill.lost


async def test_payloads_in_another_order_than_announced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, held = ProcessGroupLink.send, []

    def send(self: ProcessGroupLink, buffer: torch.Tensor, done: Done) -> None:
        held.append((buffer, done))
        if len(held) == 2:
            for each in reversed(held):
                genuine(self, *each)
        elif len(held) > 2:
            genuine(self, buffer, done)

    monkeypatch.setattr(ProcessGroupLink, "send", send)
    async with pair() as cluster:
        transfer_id = await ship(cluster, "swapped")
        assert await cluster.until_ended(transfer_id) is not Outcome.DONE
        assert transfer_id not in cluster.decode.received


async def test_a_pack_that_fails_drops_the_peer_and_the_pair_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = ChunkCodec.pack

    def pack(
        self: ChunkCodec, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor
    ) -> None:
        if transfer_id.attempt_id.request_id == "bad":
            raise RuntimeError("out of memory")
        genuine(self, transfer_id, chunk, block_table, buffer)

    monkeypatch.setattr(ChunkCodec, "pack", pack)
    async with pair() as cluster:
        transfer_id = await ship(cluster, "bad")
        assert await cluster.until_ended(transfer_id) is Outcome.LINK_LOST
        assert "out of memory" in cluster.prefill.ended[transfer_id].reason
        await cluster.wait_for(lambda: transfer_id in cluster.decode.failed)
        await check_works(cluster)
