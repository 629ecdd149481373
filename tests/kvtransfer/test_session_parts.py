"""The ways between the event loop and other threads."""

import asyncio
import threading

import pytest
import torch

from common.cores.history import MAX_EVENTS_PER_KEY, MAX_KEYS, History
from common.values.errors import InvalidTransition
from common.wire.grpc_options import channel_options, server_options
from kvtransfer.links.rendezvous import RendezvousStore
from kvtransfer.session import (
    SessionEnded,
    SessionSettings,
    ThreadsafePost,
    build_link_off_loop,
    call_in_loop,
    describe_end,
    raise_if_bug,
)
from tests.kvtransfer.cluster import FINGERPRINT, PREFILL, new_cache
from tests.kvtransfer.links.link_tools import TIMEOUT_S, build_link, new_prefix, plan


async def test_events_of_other_threads_are_dropped_once_the_post_is_closed() -> None:
    events: list[str] = []
    post: ThreadsafePost[str] = ThreadsafePost(events.append)
    thread = threading.Thread(target=lambda: [post("a"), post("b")])
    thread.start()
    thread.join()
    await asyncio.sleep(0)
    assert events == ["a", "b"]
    post("late")
    post.close()
    await asyncio.sleep(0)
    assert events == ["a", "b"]


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not call_in_loop(loop, print)


async def test_a_link_that_is_built_after_its_session_ended_is_closed() -> None:
    store = RendezvousStore("127.0.0.1", TIMEOUT_S)
    prefix = new_prefix()
    building = asyncio.create_task(build_link_off_loop(plan(store.port, prefix, 0)))
    await asyncio.sleep(0)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[Exception | None] = loop.create_future()
    try:
        other = await asyncio.to_thread(build_link, plan(store.port, prefix, 1))
    except RuntimeError as error:  # closed so early that this end is not done yet
        assert "closed by peer" in str(error)
    else:
        other.receive(torch.empty(8, dtype=torch.uint8), lambda error: call_in_loop(loop, failure.set_result, error))
        async with asyncio.timeout(TIMEOUT_S):
            assert await failure is not None
        other.close()
        assert await asyncio.to_thread(other.join, TIMEOUT_S)
    store.close()


async def test_a_link_that_cannot_be_built_names_the_reason_in_one_line() -> None:
    store = RendezvousStore("127.0.0.1", TIMEOUT_S)
    with pytest.raises(SessionEnded, match=r"^link not built: [^\n]+$"):
        await build_link_off_loop(plan(store.port, new_prefix(), 0, timeout_s=0.2))
    store.close()


def test_bugs_are_raised_and_network_faults_are_told() -> None:
    assert describe_end(TimeoutError()) == "handshake timed out"
    assert describe_end(None) == "the peer closed the control stream"
    assert describe_end(SessionEnded("why")) == "why"
    for ordinary in (None, TimeoutError(), SessionEnded("x"), ValueError("x"), asyncio.CancelledError()):
        raise_if_bug(ordinary)
    with pytest.raises(InvalidTransition):
        raise_if_bug(InvalidTransition("x"))


def test_staging_follows_the_transport() -> None:
    settings = SessionSettings(PREFILL, FINGERPRINT, new_cache(16))
    assert settings.staging_device == torch.device("cpu")
    buffer = settings.new_staging_pool().acquire(1000)
    assert not buffer.is_pinned()


def test_a_history_is_bounded_in_events_and_keys() -> None:
    history = History()
    for number in range(MAX_EVENTS_PER_KEY + 5):
        history.note("key", number)
    story = str(history.invalid("key", "problem"))
    assert story.startswith("key: problem")
    assert "\n  5\n" in story
    assert "\n  4\n" not in story
    for number in range(MAX_KEYS):
        history.note(f"other{number}", number)
    assert "nothing remembered" in str(history.invalid("key", "problem"))


def test_clients_never_ping_more_often_than_servers_allow() -> None:
    client, server = dict(channel_options()), dict(server_options())
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert server["grpc.so_reuseport"] == 0
    size = "grpc.max_receive_message_length"
    assert client[size] == server[size]
