"""Index look-ups in memory and in a router's mirror, over the prefixes of a real trace; and updates."""

import asyncio
import hashlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.cluster.memory import InMemoryIndex
from common.cluster.prefix_index.mirror import PrefixIndexMirror
from common.cluster.prefix_index.writer import RedisIndexWriter
from common.cluster.presence import WorkerPresence
from common.cluster.protocol import PrefixIndexReader, Registration
from common.cluster.registry import Lease
from common.values.ids import BlockHash, WorkerRef
from common.values.messages import Role
from tests.redis_box import binaries, redis_box

TRACE = Path(__file__).parent / "data" / "mooncake_prefixes.json"
NUM_WORKERS = 8
LONG = 256
NUM_UPDATES = 500
WORKERS = [WorkerRef(f"d{number}", "life") for number in range(NUM_WORKERS)]


def run() -> list[dict[str, Any]]:
    return asyncio.run(_measure())


async def _measure() -> list[dict[str, Any]]:
    prompts = _prompts()
    long = [BlockHash(hashlib.sha256(f"long {number}".encode()).digest()) for number in range(LONG)]
    memory = InMemoryIndex()
    held = _held(prompts, long)
    for worker, hashes in held.items():
        memory.register(Registration(worker, Role.DECODE, "none"))
        memory.writer(worker).publish(hashes, [])
    rows = await _lookup_rows("in memory", memory, prompts, long)
    found = binaries()
    if not found:
        print("index through Redis: no server on this machine, not measured")
        return rows
    with tempfile.TemporaryDirectory() as folder, redis_box(found[0], Path(folder)) as box:
        presences = await _publish(box.url, held)
        rows += await _mirror_rows(box.url, prompts, long)
        rows.append(await _update_row(box.url))
        for presence in presences:
            await presence.close()
    return rows


async def _mirror_rows(url: str, prompts: Sequence[list[BlockHash]], long: list[BlockHash]) -> list[dict[str, Any]]:
    mirror = PrefixIndexMirror(url, "bench")
    mirror.start()
    async with asyncio.timeout(20.0):
        while len(await mirror.longest_prefix(long, WORKERS)) < NUM_WORKERS:  # noqa: ASYNC110 - Redis does not call
            await asyncio.sleep(0.05)
    rows = await _lookup_rows("in a router's mirror", mirror, prompts, long)
    await mirror.close()
    return rows


async def _update_row(url: str) -> dict[str, Any]:
    """Batches as a step of a worker makes them: 32 blocks stored, 32 evicted; each waits for the one before."""
    ref = WorkerRef("updates", "life")
    lease = Lease(url, "bench", Registration(ref, Role.DECODE, "127.0.0.1:1"), 60.0)
    writer = RedisIndexWriter(url, "bench", ref, 60.0, snapshot=list)
    await lease.renew()
    await writer.flush()
    hashes = [BlockHash(hashlib.sha256(f"update {number}".encode()).digest()) for number in range(32 * NUM_UPDATES)]
    batches = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
    started_s = time.perf_counter()
    for evicted, stored in itertools.pairwise(batches):
        writer.publish(stored, evicted)
        await writer.flush()
    rate = 64 * (NUM_UPDATES - 1) / (time.perf_counter() - started_s)
    await writer.close()
    await lease.close()
    name = "index updates, 32 blocks stored and 32 evicted at a time"
    return {"metric": name, "unit": "blocks/s", "ours": rate, "peers": {}, "floor": None, "better": "higher"}


def _prompts() -> list[list[BlockHash]]:
    ids: list[list[int]] = json.loads(TRACE.read_text())
    return [[BlockHash(hashlib.sha256(str(block).encode()).digest()) for block in row] for row in ids]


def _held(prompts: Sequence[list[BlockHash]], long: list[BlockHash]) -> dict[WorkerRef, list[BlockHash]]:
    """Every worker holds its share of the prompts, and another length of the long one."""
    held: dict[WorkerRef, list[BlockHash]] = {}
    for number, worker in enumerate(WORKERS):
        blocks = {block for prompt in prompts[number::NUM_WORKERS] for block in prompt}
        held[worker] = [*blocks, *long[: LONG * (number + 1) // NUM_WORKERS]]
    return held


async def _publish(url: str, held: dict[WorkerRef, list[BlockHash]]) -> list[WorkerPresence]:
    presences = []
    for worker, hashes in held.items():
        registration = Registration(worker, Role.DECODE, "127.0.0.1:1")
        presence = WorkerPresence(url, "bench", registration, lease_s=60.0, snapshot=lambda hashes=hashes: hashes)  # type: ignore[misc]
        await presence.start()
        presence.publish(hashes, [])
        presences.append(presence)
    return presences


async def _lookup_rows(
    kind: str, reader: PrefixIndexReader, prompts: Sequence[list[BlockHash]], long: list[BlockHash]
) -> list[dict[str, Any]]:
    trace = [await _lookup_s(reader, prompt) for prompt in prompts for _ in range(2)]
    deep = [await _lookup_s(reader, long) for _ in range(500)]
    names = (f"prefixes of the trace ({len(prompts)} prompts)", f"{LONG} blocks")
    return [
        {
            "metric": f"index look-up {kind}, {NUM_WORKERS} workers, {name}, median",
            "unit": "us",
            "ours": 1e6 * statistics.median(times),
            "peers": {},
            "floor": None,
            "better": "lower",
        }
        for name, times in zip(names, (trace, deep), strict=True)
    ]


async def _lookup_s(reader: PrefixIndexReader, hashes: list[BlockHash]) -> float:
    started_s = time.perf_counter()
    await reader.longest_prefix(hashes, WORKERS)
    return time.perf_counter() - started_s
