"""Real sessions on loopback: gRPC control, gloo payloads, two caches with different block sizes."""

import asyncio
import random
import signal
import socket
from typing import Any

import grpc
import pytest
import torch

from common.values.ids import AttemptId, TransferId, WorkerRef
from common.values.ranks import WHOLE, Rank
from common.values.request import Fingerprint
from common.wire.grpc_options import channel_options
from common.wire.pb import handoff_pb2 as pb
from common.wire.pb import handoff_pb2_grpc
from kvtransfer import wire
from kvtransfer.events import (
    ExpectationWithdrawn,
    PeerReady,
    TransferCancelRequested,
    TransferOutcome,
)
from tests.caches import blocks_hold, fill, fill_block, snapshot
from tests.kvtransfer.cluster import (
    DECODE,
    FINGERPRINT,
    FIRST,
    NUM_TOKENS,
    PREFILL,
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
from tests.kvtransfer.decode_child import DecodeChild
from tests.kvtransfer.links.link_tools import listening_addresses, num_fds, num_threads
from tests.kvtransfer.links.test_ports import takes_nobody
from tests.waiting import until


@pytest.mark.parametrize("step", [1, 7, 16, 24, 100])
async def test_a_request_ships_layer_by_layer_into_blocks_of_another_size(step: int) -> None:
    async with pair() as cluster:
        transfer_id = await ship(cluster, "r1", step=step)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.DONE
        received = cluster.decode.received[transfer_id]
        assert received.tokens == FIRST
        assert 0 <= received.exposed_s <= received.transfer_s
        assert torch.equal(rows_of(cluster.decode.kv, TARGET_TABLE, NUM_TOKENS), request_rows(1, NUM_TOKENS))


@pytest.mark.parametrize("block_sizes", [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("digest", [True, False])
async def test_a_cached_prefix_is_neither_sent_nor_touched(block_sizes: tuple[int, int], digest: bool) -> None:
    sizes = {"prefill_block_size": block_sizes[0], "decode_block_size": block_sizes[1]}
    async with pair(**sizes, digest=digest) as cluster:
        fill(cluster.decode.kv, -1.0)
        num_tokens = 60
        transfer_id = await ship(cluster, "r1", first_token=32, num_tokens=num_tokens)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.DONE
        received = rows_of(cluster.decode.kv, TARGET_TABLE, num_tokens)
        assert torch.equal(received[:, :, 32:], request_rows(1, num_tokens)[:, :, 32:])
        assert bool((received[:, :, :32] == -1.0).all())


async def test_several_requests_share_one_link() -> None:
    async with pair() as cluster:
        transfer_ids = []
        for index in range(6):
            transfer_id = new_transfer_id(f"r{index}")
            transfer_ids.append(transfer_id)
            cluster.decode.expect(transfer_id, (2 * index, 2 * index + 1), 64)
            cluster.prefill.start(transfer_id, cluster.address, tuple(range(4 * index, 4 * index + 4)), 64)
        computations = (
            cluster.prefill.compute(each, tuple(range(4 * index, 4 * index + 4)), request_rows(index, 64), 16)
            for index, each in enumerate(transfer_ids)
        )
        await asyncio.gather(*computations)
        for index, transfer_id in enumerate(transfer_ids):
            assert await cluster.until_ended(transfer_id) is TransferOutcome.DONE
            assert torch.equal(rows_of(cluster.decode.kv, (2 * index, 2 * index + 1), 64), request_rows(index, 64))
        assert sum(isinstance(event, PeerReady) for event in cluster.decode.events) == 1


async def test_only_loopback_is_listened_on() -> None:
    async with pair() as cluster:
        await check_works(cluster)
        assert listening_addresses() <= {"0100007F", "0000000000000000FFFF00000100007F"}


# ---- cancel and withdrawal ------------------------------------------------------------------------------


async def test_a_cancel_in_mid_transfer_frees_both_sides_and_the_pair_goes_on() -> None:
    async with pair(max_inflight_bytes=4096) as cluster:
        transfer_id = new_transfer_id("left")
        cluster.decode.expect(transfer_id, TARGET_TABLE, NUM_TOKENS)
        cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS)
        computing = asyncio.create_task(
            cluster.prefill.compute(transfer_id, SOURCE_TABLE, request_rows(1, NUM_TOKENS), 50)
        )
        await cluster.wait_for(lambda: any(isinstance(event, PeerReady) for event in cluster.decode.events))
        cluster.prefill.loop.post(TransferCancelRequested(transfer_id, "client left"))
        assert await cluster.until_ended(transfer_id) is TransferOutcome.CANCELLED
        computing.cancel()
        cluster.decode.loop.post(ExpectationWithdrawn(transfer_id.attempt_id, "client left"))
        await cluster.wait_for(lambda: transfer_id.attempt_id in cluster.decode.released)
        await check_works(cluster)


async def test_released_blocks_are_never_written_again() -> None:
    """Random withdrawals in mid-transfer; released blocks are poisoned, and stay so until they are granted again."""
    rng = random.Random(3)
    async with pair(max_inflight_bytes=6000) as cluster:
        blocks = list(range(8))
        for round_idx in range(20):
            rng.shuffle(blocks)
            mine, poisoned = tuple(blocks[:4]), blocks[4:]
            fill_block(cluster.decode.kv, poisoned, 12345.0)
            transfer_id = new_transfer_id(f"round{round_idx}")
            cluster.decode.expect(transfer_id, mine, NUM_TOKENS)
            cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS)
            computing = asyncio.create_task(
                cluster.prefill.compute(transfer_id, SOURCE_TABLE, request_rows(round_idx, NUM_TOKENS), 20)
            )
            await withdraw_after(cluster, transfer_id.attempt_id, num_events=rng.randint(0, 30))
            await cluster.wait_for(lambda transfer_id=transfer_id: transfer_id in cluster.prefill.ended)
            computing.cancel()
            assert blocks_hold(cluster.decode.kv, [poisoned], 12345.0)
        await check_works(cluster)
        assert not cluster.prefill.lost


async def withdraw_after(cluster: Pair, attempt_id: AttemptId, num_events: int) -> None:
    """Withdraw when `num_events` more events have come, unless the transfer completes before."""
    target = len(cluster.decode.events) + num_events

    def is_time() -> bool:
        return len(cluster.decode.events) >= target or is_received()

    def is_received() -> bool:
        return any(each.attempt_id == attempt_id for each in cluster.decode.received)

    await cluster.wait_for(is_time)
    if not is_received():
        cluster.decode.loop.post(ExpectationWithdrawn(attempt_id, "client left"))
        await cluster.wait_for(lambda: attempt_id in cluster.decode.released)


async def test_a_request_that_nobody_expects_is_drained_and_cancelled() -> None:
    async with pair() as cluster:
        transfer_id = new_transfer_id("unknown")
        cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS)
        await cluster.prefill.compute(transfer_id, SOURCE_TABLE, request_rows(1, NUM_TOKENS), 24)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.CANCELLED
        assert not snapshot(cluster.decode.kv).any()
        await check_works(cluster)


# ---- who may pair ---------------------------------------------------------------------------------------

FIELDS = ["layers", "kv_heads", "head_dim", "dtype", "model", "weights", "rope", "protocol", "tokenizer"]


@pytest.mark.parametrize("name", FIELDS)
async def test_a_worker_that_differs_in_one_field_is_refused_with_both_values(name: str) -> None:
    theirs = Fingerprint(tuple(sorted({**dict(FINGERPRINT.fields), name: "other"}.items())))
    async with pair(prefill_pairing=theirs) as cluster:
        transfer_id = await ship(cluster, "r1")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        reason = cluster.prefill.ended[transfer_id].reason
        assert reason.startswith(f"FAILED_PRECONDITION: {name}: ")
        assert "'other'" in reason
        assert repr(dict(FINGERPRINT.fields).get(name)) in reason
        assert not any(isinstance(event, PeerReady) for event in cluster.decode.events)


@pytest.mark.parametrize("digest", [True, False])
async def test_a_worker_that_seals_otherwise_is_refused_with_both_values(digest: bool) -> None:
    async with pair(digest=digest, prefill_digest=not digest) as cluster:
        transfer_id = await ship(cluster, "r1")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        here, there = ("none", "aes-gcm") if digest else ("aes-gcm", "none")
        expected = f"encryption: '{here}' here, '{there}' there (setting `digest`)"
        assert cluster.prefill.ended[transfer_id].reason == expected
        assert not any(isinstance(event, PeerReady) for event in cluster.decode.events)


async def test_another_incarnation_at_the_address_is_not_trusted() -> None:
    async with pair() as cluster:
        stale = WorkerRef(DECODE.worker_id, "before")
        transfer_id = new_transfer_id("r1")
        cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS, peer=stale)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert "expected decode-0#before, decode-0#bb answers" in cluster.prefill.ended[transfer_id].reason


async def test_an_absent_decode_worker_ends_the_transfer() -> None:
    async with pair() as cluster:
        transfer_id = new_transfer_id("r1")
        cluster.prefill.start(transfer_id, "127.0.0.1:1", SOURCE_TABLE, NUM_TOKENS)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert cluster.prefill.ended[transfer_id].reason.startswith("UNAVAILABLE")


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([pb.ConnectRequest(open_link=pb.OpenLink(epoch="0" * 16))], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.ConnectRequest(hello=pb.SenderHello(worker_id="p"))], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.ConnectRequest()], grpc.StatusCode.INVALID_ARGUMENT),
        ([wire.sender_hello(PREFILL, FINGERPRINT, WHOLE), pb.ConnectRequest()], grpc.StatusCode.ABORTED),
        (
            [wire.sender_hello(PREFILL, FINGERPRINT, WHOLE), pb.ConnectRequest(open_link=pb.OpenLink(epoch="../../x"))],
            grpc.StatusCode.ABORTED,
        ),
        (
            [
                wire.sender_hello(PREFILL, FINGERPRINT, Rank(1, 2)),
                pb.ConnectRequest(open_link=pb.OpenLink(epoch="0" * 16)),
            ],
            grpc.StatusCode.ABORTED,
        ),
    ],
    ids=["no hello", "no incarnation", "empty", "no epoch", "bad epoch", "of several ranks"],
)
async def test_a_stream_that_does_not_shake_hands_is_refused(
    messages: list[pb.ConnectRequest], code: grpc.StatusCode
) -> None:
    async with pair() as cluster, grpc.aio.insecure_channel(cluster.address, options=channel_options()) as channel:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Connect()
        for message in messages:
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is code
        await check_works(cluster)


async def test_a_sender_that_has_ended_connects_to_nobody() -> None:
    """A core may not have heard of the end: its transfer ends, and no session is begun."""
    async with pair() as cluster:
        await cluster.prefill.sessions.close()
        transfer_id = new_transfer_id("late")
        cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert cluster.prefill.ended[transfer_id].reason == "this worker stops"
        assert cluster.prefill.sessions.is_quiet
        assert cluster.decode.events == []


async def test_a_receiver_that_has_ended_takes_nobody_in() -> None:
    async with pair() as cluster:
        await cluster.decode.sessions.close()
        transfer_id = await ship(cluster, "late")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert cluster.prefill.ended[transfer_id].reason == "UNAVAILABLE: this worker stops"
        assert not any(isinstance(event, PeerReady) for event in cluster.decode.events)
        assert cluster.decode.sessions.is_quiet


# ---- lives and deaths -----------------------------------------------------------------------------------


async def test_a_peer_that_connects_again_replaces_its_older_session() -> None:
    async with pair() as cluster:
        await check_works(cluster, "before")
        async with grpc.aio.insecure_channel(cluster.address, options=channel_options()) as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Connect()
            await call.write(wire.sender_hello(PREFILL, FINGERPRINT, WHOLE))
            assert (await call.read()).HasField("hello")
            await cluster.wait_for(lambda: bool(cluster.prefill.lost))
            assert "connected again" in cluster.decode.lost[0].reason
            call.cancel()
        await check_works(cluster, "after")


async def test_links_are_rebuilt_after_each_loss_and_leave_nothing_behind() -> None:
    async with pair() as cluster:
        await check_works(cluster, "warm")
        await drop(cluster)
        await check_works(cluster, "warm again")
        threads, fds = num_threads(), num_fds()
        store = cluster.decode.sessions._shared.store
        keys = await asyncio.to_thread(lambda: store.num_keys)
        for cycle in range(8):
            await drop(cluster)
            await check_works(cluster, f"cycle{cycle}")
        # The last link's threads end on their own, a moment after both sides know.
        await until(lambda: asyncio.to_thread(lambda: num_threads() <= threads + 5 and num_fds() <= fds + 5))
        assert await asyncio.to_thread(lambda: store.num_keys) <= keys + 5


async def test_a_link_lost_in_mid_transfer_ends_it_on_both_sides_and_the_next_try_fills_the_same_blocks() -> None:
    async with pair(max_inflight_bytes=3000) as cluster:
        transfer_id = new_transfer_id("r1")
        cluster.decode.expect(transfer_id, TARGET_TABLE, NUM_TOKENS)
        cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, NUM_TOKENS)
        computing = asyncio.create_task(
            cluster.prefill.compute(transfer_id, SOURCE_TABLE, request_rows(1, NUM_TOKENS), 10)
        )
        await cluster.wait_for(lambda: sum(hasattr(event, "error") for event in cluster.decode.events) >= 2)
        await drop(cluster)
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        computing.cancel()
        await cluster.wait_for(lambda: transfer_id in cluster.decode.failed)
        assert cluster.decode.failed[transfer_id].outcome is TransferOutcome.LINK_LOST
        second = TransferId(transfer_id.attempt_id, 1)
        cluster.prefill.start(second, cluster.address, SOURCE_TABLE, NUM_TOKENS)
        await cluster.prefill.compute(second, SOURCE_TABLE, request_rows(1, NUM_TOKENS), 24)
        assert await cluster.until_ended(second) is TransferOutcome.DONE
        assert torch.equal(rows_of(cluster.decode.kv, TARGET_TABLE, NUM_TOKENS), request_rows(1, NUM_TOKENS))


async def test_staging_buffers_are_all_given_back() -> None:
    async with pair(max_inflight_bytes=5000) as cluster:
        await check_works(cluster)
        pools = [cluster.decode.sessions._shared.pool, cluster.prefill.sessions._peers[DECODE]._pool]
        await cluster.wait_for(lambda: not any(pool.num_out for pool in pools))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_dead_or_frozen_decode_worker_ends_its_transfers_and_holds_up_no_other(
    number: signal.Signals, transport: str
) -> None:
    """It dies with chunks under way to it, while another decode worker is served by the same prefill worker."""
    settings: dict[str, Any] = {"link_timeout_s": 5.0, "max_inflight_bytes": 3000, "transports": (transport, transport)}
    async with pair(**settings) as cluster, DecodeChild("doomed", transport) as child:
        doomed = new_transfer_id("doomed")
        cluster.prefill.start(doomed, child.address, SOURCE_TABLE, NUM_TOKENS, peer=child.ref)
        rows = request_rows(1, NUM_TOKENS)
        cluster.prefill.report(doomed, SOURCE_TABLE, rows, token_end=50)
        await cluster.wait_for(lambda: cluster.prefill.num_sent(doomed) >= 1)
        child.process.send_signal(number)
        cluster.prefill.report(doomed, SOURCE_TABLE, rows, token_end=NUM_TOKENS)
        await check_works(cluster, "meanwhile")
        assert await cluster.until_ended(doomed) is TransferOutcome.LINK_LOST
        await check_works(cluster, "afterwards")


async def test_the_rendezvous_port_is_open_while_a_link_is_made_and_keeps_no_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.receiver.sessions.HANG_UP_INTERVAL_S", 0.05)
    async with pair() as cluster:
        store = cluster.decode.sessions._shared.store
        assert takes_nobody(store.port)
        store.open("test")
        with socket.create_connection(("127.0.0.1", store.port), timeout=60) as stranger:
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        store.shut()
        await check_works(cluster, "a link is made")
        assert not takes_nobody(store.port)
