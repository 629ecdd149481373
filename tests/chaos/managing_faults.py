"""Faults of what manages workers: Ray's control store, and operators who change the weights."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from tests.chaos import sockets
from tests.chaos.clients import Clients
from tests.chaos.faults import DECODING
from tests.chaos.ledger import Outcome
from tests.chaos.questions import make_questions
from tests.chaos.rig import Act, Rig, Scene, Void, Worker, is_gone
from tests.tiny_model import TinyModel, write_tiny_model

OTHER_SEED = 1


def kill_ray_control(for_s: float) -> Act:
    """Ray loses its memory for good; the workers need it to be placed, not to serve."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        pid = rig.ray_control_pid()
        ports = sockets.listening_ports(pid)
        before = {worker["incarnation"] for worker in rig.workers()}
        scene.begins()
        proof = await rig.kill(pid)
        await asyncio.sleep(for_s)
        after = {worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)}
        assert after == before, "workers went with Ray's control store"
        if psutil.pid_exists(pid) and not is_gone(psutil.Process(pid)):
            raise Void("it is there again")
        scene.lifted()
        num_right = sum(entry.outcome is Outcome.RIGHT for entry in scene.clients.entries)
        return f"{proof}, ports {sorted(ports)} closed; {num_right} requests were answered within {for_s:g} s"

    return act


def join_with_other_weights() -> Act:
    """Two kinds of weights in one cluster; workers of either kind die amid answers, which only their own can finish."""

    async def act(scene: Scene) -> str:
        rig, clients = scene.rig, scene.clients
        with tempfile.TemporaryDirectory() as folder:
            other = write_tiny_model(Path(folder) / "other", TinyModel(seed=OTHER_SEED))
            answers = await asyncio.to_thread(make_questions, other, [each.case for each in clients.questions])
            clients.questions = [
                replace(each, others=(also,)) for each, also in zip(clients.questions, answers, strict=True)
            ]
            scene.begins()
            async with _workers_of(rig, other, Path(folder)) as (prefill, decode):
                both = (False, True)
                await rig.until(lambda: all(_num_of_kind(clients, is_other=it) > 5 for it in both), "both kinds", 60)
                proofs = [await rig.kill(await _catch_decoding(rig, "decode-"))]
                await rig.until(lambda: {"decode-0", "decode-1"} <= _names(rig), "another in its place", 60)
                proofs.append(await rig.kill(await _catch_decoding(rig, decode)))
                await rig.until(lambda: not _names(rig) & {decode}, "the end of the dead worker")
            await rig.until(lambda: not _names(rig) & {prefill, decode}, "the end of the newcomers")
            scene.lifted()
        counts = [_num_of_kind(clients, is_other=it) for it in (False, True)]
        return f"{counts[0]} answers of the old weights, {counts[1]} of the others; {'; '.join(proofs)}"

    return act


@asynccontextmanager
async def _workers_of(rig: Rig, model: Path, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """One prefill and one decode worker of another model in the same cluster; their ids. They end with the block."""
    config = rig.router_config()
    config["model"]["path"] = str(model)
    path = folder / "other.json"
    path.write_text(json.dumps({**config, **{name: rig.shape.merged()[name] for name in _SECTIONS}}))
    names = ("other-prefill", "other-decode")
    commands = [("worker", "--role", name.partition("-")[2], "--worker-id", name, "--config", path) for name in names]
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.cli", *map(str, command), stderr=asyncio.subprocess.DEVNULL
        )
        for command in commands
    ]
    try:
        await rig.until(lambda: _names(rig) >= set(names), "the newcomers", 60)
        yield names
    finally:
        for process in started:
            if process.returncode is None:
                process.terminate()
            await process.wait()


_SECTIONS = ("prefill_worker", "decode_worker")


async def _catch_decoding(rig: Rig, worker_id: str) -> int:
    """The pid of a decode worker whose id begins so, while it decodes something."""

    def caught() -> Worker | None:
        for worker in rig.workers("decode"):
            is_wanted = str(worker["worker_id"]).startswith(worker_id)
            if is_wanted and any(holding.phase in DECODING for holding in rig.holders(worker)):
                return worker
        return None

    found: Worker = await rig.until(caught, f"a {worker_id} worker that decodes")
    return int(found["pid"])


def _names(rig: Rig) -> set[str]:
    return {str(worker["worker_id"]) for worker in rig.workers() if worker["state"] == "ready"}


def _num_of_kind(clients: Clients, *, is_other: bool) -> int:
    right = [entry for entry in clients.entries if entry.outcome is Outcome.RIGHT and entry.answer is not None]
    return sum(bool(entry.answer is not entry.question) == is_other for entry in right)
