"""Faults of connections: dropped, one-way, slow, reset. By the kernel, on the connections that are in use."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tests.chaos import sockets
from tests.chaos.faults import DECODING, PREFILLING, TRANSFERRING
from tests.chaos.rig import Act, Rig, Scene, Void, Worker


def drop_link(link: str, for_s: float) -> Act:
    """All packets of a handoff pair are dropped, on `control`, `kv`, `both`, or only those to `prefill`."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        prefill = await rig.catch("prefill", (*PREFILLING, *TRANSFERRING))
        with ExitStack() as stack:
            ends = []
            for decode in rig.workers("decode"):
                ends += stack.enter_context(rig.control_links(prefill, decode)) if link != "kv" else []
                ends += stack.enter_context(rig.kv_links(prefill, decode)) if link in ("kv", "both") else []
            if link == "prefill":
                ends = [end for end in ends if end.pid == prefill["pid"]]
            before = _retransmits(ends)
            scene.begins()
            with sockets.black_hole(ends):
                await asyncio.sleep(for_s)
                num_resent = _retransmits(ends) - before
            scene.lifted()
        if not ends or num_resent <= 0:
            raise Void(f"{len(ends)} connection ends, {num_resent} retransmits")
        return f"{len(ends)} connection ends deaf for {for_s:g} s, {num_resent} segments sent again"

    return act


def drop_router_link(role: str, for_s: float) -> Act:
    """All packets between the router and one worker are dropped."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        worker = await rig.catch(role, (*DECODING, *PREFILLING))
        with rig.router_links(worker) as ends:
            before = _retransmits(ends)
            scene.begins()
            with sockets.black_hole(ends):
                await asyncio.sleep(for_s)
                num_resent = _retransmits(ends) - before
            scene.lifted()
        if num_resent <= 0:
            raise Void(f"{len(ends)} connection ends, {num_resent} retransmits")
        return f"{worker['worker_id']}: {len(ends)} ends deaf for {for_s:g} s, {num_resent} segments sent again"

    return act


def reset_link(link: str) -> Act:
    """RST on the connections of a handoff pair while it moves KV."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        prefill = await rig.catch("prefill", (*PREFILLING, *TRANSFERRING))
        num_reset = 0
        scene.begins()
        for decode in rig.workers("decode"):
            links = rig.control_links if link == "control" else rig.kv_links
            with links(prefill, decode) as ends:
                num_reset += sockets.reset([end for end in ends if end.pid == prefill["pid"]])
        if not num_reset:
            raise Void("no connection to reset")
        return f"{prefill['worker_id']}: RST on {num_reset} {link} connections"

    return act


def slow_link(bytes_per_s: int, for_s: float) -> Act:
    """The KV connections of every pair are limited to so many bytes per second."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        with ExitStack() as stack:
            ends = []
            for prefill in rig.workers("prefill"):
                for decode in rig.workers("decode"):
                    ends += stack.enter_context(rig.kv_links(prefill, decode))
            scene.begins()
            with sockets.paced(ends, bytes_per_s):
                await asyncio.sleep(for_s)
                rates = {end.pacing_rate for end in ends}
            scene.lifted()
        if rates != {bytes_per_s}:
            raise Void(f"{len(ends)} ends, rates {rates}")
        return f"{len(ends)} connection ends limited to {bytes_per_s} B/s for {for_s:g} s"

    return act


def deafen_rendezvous(for_s: float) -> Act:
    """No connection gets through to the store where the two ends of a link find each other.

    Pairs that stand do not need it: nothing is retried. Then the links of one decode worker break, and cannot be made
    again before the store hears.
    """

    async def act(scene: Scene) -> str:
        rig = scene.rig
        decode = (await asyncio.to_thread(rig.workers, "decode"))[0]
        prefills = await asyncio.to_thread(rig.workers, "prefill")
        await rig.until(lambda: all(_num_links(rig, each, decode) for each in prefills), "links to all prefill workers")
        with rig.rendezvous(decode) as stores:
            if not stores:
                raise Void("no store that listens")
            scene.begins()
            with sockets.unreachable(stores):
                failures = _failures(rig)
                await asyncio.sleep(for_s)
                assert _failures(rig) == failures, "a pair that stood needed the store"
                for prefill in prefills:
                    with rig.kv_links(prefill, decode) as ends:
                        sockets.reset(ends)
                await rig.until(lambda: _failures(rig) > failures, "a transfer that met a broken link")
                await asyncio.sleep(for_s)
                num_made = sum(_num_links(rig, each, decode) for each in prefills)
                if num_made:
                    raise Void(f"{num_made} ends of links were made without the store")
            scene.lifted()
        await rig.until(lambda: any(_num_links(rig, each, decode) for each in prefills), "a new link", 10)
        took_s = time.monotonic() - scene.lifted_s
        return f"{decode['worker_id']}: store deaf for {2 * for_s:g} s, a link was made {took_s:.1f} s later"

    return act


def _num_links(rig: Rig, prefill: Worker, decode: Worker) -> int:
    with rig.kv_links(prefill, decode) as ends:
        return len(ends)


def _failures(rig: Rig) -> float:
    return rig.counter("pdserve_request_retries_total")


def _retransmits(ends: Sequence[sockets.Connection]) -> int:
    return sum(end.num_retransmits for end in ends)
