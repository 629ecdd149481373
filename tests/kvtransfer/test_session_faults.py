"""Planted faults on a real session: each is detected, and the pair works afterwards."""

import pytest
import torch

from common.values.ids import TransferId
from kvtransfer.chunk.codec import HEADER_BYTES, ChunkCodec
from kvtransfer.events import (
    Chunk,
    TransferOutcome,
)
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import Done
from tests.caches import fill
from tests.kvtransfer.cluster import (
    NUM_TOKENS,
    SOURCE_TABLE,
    TARGET_TABLE,
    Pair,
    check_works,
    drop,
    new_transfer_id,
    pair,
    request_rows,
    rows_of,
    ship,
)

SAME = new_transfer_id("same")

# ---- planted faults -------------------------------------------------------------------------------------


def plant_in_pack(monkeypatch: pytest.MonkeyPatch, name: str, position: int) -> list[Chunk]:
    """Flip a bit of the second chunk of request `name` after it was encrypted; returns where it happened."""
    genuine, planted = ChunkCodec.pack, []

    def pack(
        self: ChunkCodec, transfer_id: TransferId, chunk: Chunk, block_table: tuple[int, ...], buffer: torch.Tensor
    ) -> None:
        genuine(self, transfer_id, chunk, block_table, buffer)
        if transfer_id.attempt_id.request_id == name and chunk.seq == 1:
            buffer[position] ^= 1
            planted.append(chunk)

    monkeypatch.setattr(ChunkCodec, "pack", pack)
    return planted


@pytest.mark.parametrize(
    ("position", "named"), [(HEADER_BYTES + 77, "not what the peer encrypted"), (10, "expected transfer")]
)
async def test_a_flipped_bit_is_refused_and_the_pair_goes_on(
    monkeypatch: pytest.MonkeyPatch, position: int, named: str
) -> None:
    planted = plant_in_pack(monkeypatch, "flipped", position)
    async with pair() as cluster:
        fill(cluster.decode.kv, -1.0)
        transfer_id = await ship(cluster, "flipped")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.CANCELLED
        (chunk,) = planted
        received = rows_of(cluster.decode.kv, TARGET_TABLE, NUM_TOKENS)
        assert bool(
            (received[chunk.layer_start : chunk.layer_end, :, chunk.token_start : chunk.token_end] == -1.0).all()
        )
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
        assert await cluster.until_ended(transfer_id) is TransferOutcome.CANCELLED
        assert planted == [difference]
        await check_works(cluster)
        assert not cluster.prefill.lost


class Tap:
    """Sees each message of every link in order, and may send another in its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[torch.Tensor] = []
        self.replace_with: torch.Tensor | None = None  # once
        genuine = ProcessGroupLink.send

        def send(link: ProcessGroupLink, buffer: torch.Tensor, done: Done) -> None:
            self.messages.append(buffer.clone())
            if self.replace_with is not None:
                buffer.copy_(self.replace_with)
                self.replace_with = None
            genuine(link, buffer, done)

        monkeypatch.setattr(ProcessGroupLink, "send", send)


async def ship_same(cluster: Pair) -> TransferOutcome:
    """One request of one name, tokens and try: all of it is announced alike each time, in one message."""
    rows = request_rows(1, NUM_TOKENS)
    cluster.decode.expect(SAME, TARGET_TABLE, NUM_TOKENS)
    cluster.prefill.ended.pop(SAME, None)
    cluster.prefill.start(SAME, cluster.address, SOURCE_TABLE, NUM_TOKENS)
    num_sent = cluster.prefill.num_sent(SAME)
    await cluster.prefill.compute(SAME, SOURCE_TABLE, rows, NUM_TOKENS)
    outcome = await cluster.until_ended(SAME)
    # What came of the message may be heard after the end, and would be taken for the next one's: ids come once else.
    await cluster.wait_for(lambda: cluster.prefill.num_sent(SAME) > num_sent)
    return outcome


async def test_a_message_of_the_same_chunk_sent_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and data are what is announced; only the place on the link is another."""
    tap = Tap(monkeypatch)
    async with pair(min_chunk_bytes=1 << 20, max_inflight_bytes=1 << 20) as cluster:
        assert await ship_same(cluster) is TransferOutcome.DONE
        (first,) = tap.messages
        tap.replace_with = first
        assert await ship_same(cluster) is TransferOutcome.CANCELLED
        assert "not what the peer encrypted" in cluster.prefill.ended[SAME].reason
        assert not cluster.prefill.lost
        await check_works(cluster)


async def test_a_message_of_an_earlier_session_at_the_same_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of one link, as the first of the next: each session has a key of its own."""
    tap = Tap(monkeypatch)
    async with pair(min_chunk_bytes=1 << 20, max_inflight_bytes=1 << 20) as cluster:
        assert await ship_same(cluster) is TransferOutcome.DONE
        (first,) = tap.messages
        await drop(cluster)
        tap.replace_with = first
        assert await ship_same(cluster) is TransferOutcome.CANCELLED
        assert "not what the peer encrypted" in cluster.prefill.ended[SAME].reason
        await check_works(cluster)


@pytest.mark.parametrize("digest", [True, False])
async def test_the_link_carries_plain_kv_only_where_the_seal_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, digest: bool
) -> None:
    tap = Tap(monkeypatch)
    async with pair(min_chunk_bytes=1 << 20, max_inflight_bytes=1 << 20, digest=digest) as cluster:
        assert await ship_same(cluster) is TransferOutcome.DONE
        (message,) = tap.messages
    rows = request_rows(1, NUM_TOKENS).numpy().tobytes()
    assert (rows[:64] in message.numpy().tobytes()) is not digest


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
        assert await cluster.until_ended(transfer_id) is not TransferOutcome.DONE
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
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert "out of memory" in cluster.prefill.ended[transfer_id].reason
        # The end may overtake the announcement, so that the other side never hears of the transfer.
        await cluster.wait_for(lambda: bool(cluster.decode.lost))
        await check_works(cluster)
