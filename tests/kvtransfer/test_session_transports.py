"""Which link two workers take, by their settings and by what there is between them."""

import secrets

import pytest
from structlog.testing import capture_logs

from kvtransfer.events import PeerReady, TransferOutcome
from kvtransfer.links.meeting import RING_BYTES
from tests.kvtransfer.cluster import check_works, pair, ship


@pytest.mark.parametrize(
    ("transports", "wanted"),
    [(("auto", "auto"), "shm"), (("shm", "auto"), "shm"), (("gloo", "auto"), "gloo"), (("auto", "gloo"), "gloo")],
)
async def test_two_workers_of_one_host_take_the_best_link_that_both_allow(
    transports: tuple[str, str], wanted: str
) -> None:
    with capture_logs() as logs:
        async with pair(transports=transports) as cluster:
            await check_works(cluster)
            await check_works(cluster, "another")
            first, second = cluster.decode.received.values()
            assert (first.transport, second.transport) == (wanted, wanted)
            assert second.link_bytes_per_s > 0.0  # measured with the first
            (peer_ready,) = (event for event in cluster.decode.events if isinstance(event, PeerReady))
            assert peer_ready.link_bytes == (RING_BYTES if wanted == "shm" else 0)
    ready = [log for log in logs if log["event"] == "handoff_peer_ready"]
    assert [log["transport"] for log in ready] == [wanted, wanted]


async def test_without_common_memory_auto_becomes_gloo_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between containers: the receiver's socket cannot be reached."""
    monkeypatch.setattr("kvtransfer.links.meeting._address", lambda name: b"\0" + secrets.token_hex(8).encode())
    with capture_logs() as logs:
        async with pair(transports=("auto", "auto")) as cluster:
            await check_works(cluster)
    (log,) = (log for log in logs if log["event"] == "handoff_without_shm")
    assert log["transport"] == "gloo"
    assert "not on this host" in log["reason"]


async def test_shm_that_was_asked_for_is_not_replaced_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.links.meeting._address", lambda name: b"\0" + secrets.token_hex(8).encode())
    async with pair(transports=("shm", "shm")) as cluster:
        transfer_id = await ship(cluster, "r1")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        assert "transport shm: the receiver is not on this host" in cluster.prefill.lost[0].reason


@pytest.mark.parametrize("transports", [("gloo", "shm"), ("nccl", "auto")])
async def test_settings_that_contradict_each_other_end_the_session_by_name(transports: tuple[str, str]) -> None:
    async with pair(transports=transports) as cluster:
        transfer_id = await ship(cluster, "r1")
        assert await cluster.until_ended(transfer_id) is TransferOutcome.LINK_LOST
        here, there = transports
        assert f"transport: {here!r} here, {there!r} there" in cluster.prefill.lost[0].reason
