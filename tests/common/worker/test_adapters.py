"""Work waits at the door until its adapter is in memory, and is refused where it cannot be had."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoint import open_checkpoint
from common.checkpoint.adapters import open_adapter
from common.engine.executor.adapters import Adapters
from common.values.ids import AttemptId, RequestId, RouterId, WorkerRef
from common.values.messages import Cancel, Prefill, Refused, Reserve
from common.values.request import NO_ADAPTER, Adapter, SamplingParams, Work
from common.worker.adapters import AdapterDoor
from tests.tiny_adapter import TinyAdapter, write_adapter
from tests.tiny_model import write_tiny_model
from tests.waiting import until

A, B = RouterId("a"), RouterId("b")


class Rig:
    """A door over real adapters; what it passes on and what it refuses."""

    def __init__(self, model: Path, folder: Path, max_loras: int = 2) -> None:
        self.spec = open_checkpoint(model).config
        self.adapters = Adapters(self.spec, torch.float32, "cpu")
        paths = [write_adapter(folder / str(seed), model, TinyAdapter(seed=seed)) for seed in range(4)]
        self.known = [Adapter(open_adapter(path, self.spec).digest, str(path)) for path in paths]
        self.passed: list[tuple[RouterId, Any]] = []
        self.refused: list[Refused] = []
        self.in_use: set[str] = set()
        metrics: Any = SimpleNamespace(inc=lambda *_, **__: None, set=lambda *_, **__: None)
        self.door = AdapterDoor(
            self.adapters,
            max_loras,
            lambda: self.in_use,
            lambda router_id, message: self.passed.append((router_id, message)),
            lambda _, refused: self.refused.append(refused),
            metrics,
        )

    async def settled(self, is_so: Callable[[], bool]) -> None:
        async def check() -> bool:
            return is_so()

        await until(check)

    async def used(self, *numbers: int) -> None:
        """Each is asked for and has come."""
        for number in numbers:
            count = len(self.passed)
            self.door.on_message(A, reserve(f"use{count}", self.known[number]))
            await self.settled(lambda count=count: len(self.passed) > count)  # type: ignore[misc]


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    return Rig(write_tiny_model(tmp_path / "tiny"), tmp_path / "adapters")


def reserve(name: str, adapter: Adapter = NO_ADAPTER) -> Reserve:
    sampling = SamplingParams(seed=0, max_tokens=1)
    return Reserve(Work(AttemptId(RequestId(name), 0), (1, 2), 2, sampling, adapter=adapter))


async def test_work_without_an_adapter_passes_at_once(rig: Rig) -> None:
    rig.door.on_message(A, reserve("r"))
    assert len(rig.passed) == 1


async def test_work_waits_for_its_adapter_and_keeps_its_order(rig: Rig) -> None:
    first, second = reserve("1", rig.known[0]), reserve("2", rig.known[0])
    cancel = Cancel(AttemptId(RequestId("1"), 0))
    for message in (first, second, cancel, reserve("3")):
        rig.door.on_message(A, message)
    assert rig.passed == [(A, reserve("3"))]
    await rig.settled(lambda: len(rig.passed) == 4)
    assert rig.passed[1:] == [(A, first), (A, second), (A, cancel)]
    assert rig.adapters.digests == (rig.known[0].digest,)
    rig.door.on_message(A, first)
    assert rig.passed[-1] == (A, first), "it is there by now"


async def test_the_work_of_a_lost_router_does_not_come(rig: Rig) -> None:
    rig.door.on_message(A, reserve("1", rig.known[0]))
    rig.door.on_message(B, reserve("2", rig.known[0]))
    rig.door.on_router_lost(A)
    await rig.settled(lambda: bool(rig.passed))
    assert [router for router, _ in rig.passed] == [B]


async def test_the_adapter_that_was_not_used_for_longest_makes_room(rig: Rig) -> None:
    await rig.used(0, 1, 0, 2)
    assert rig.adapters.digests == (rig.known[0].digest, rig.known[2].digest)


async def test_what_is_in_use_stays_and_others_are_refused_for_now(rig: Rig) -> None:
    await rig.used(0, 1)
    rig.in_use = {rig.known[0].digest, rig.known[1].digest}
    rig.door.on_message(A, reserve("x", rig.known[2]))
    assert [(each.is_retryable, "max_loras" in each.reason) for each in rig.refused] == [(True, True)]
    rig.in_use = {rig.known[0].digest}
    await rig.used(3)
    assert set(rig.adapters.digests) == {rig.known[0].digest, rig.known[3].digest}


async def test_one_that_is_being_read_takes_room(rig: Rig) -> None:
    for number in range(3):
        rig.door.on_message(A, reserve(str(number), rig.known[number]))
    assert len(rig.refused) == 1
    await rig.settled(lambda: len(rig.passed) == 2)


async def test_files_that_changed_refuse_the_work_for_good_and_by_its_try(rig: Rig) -> None:
    write_adapter(Path(rig.known[0].path), Path(rig.known[0].path).parents[1] / "tiny", TinyAdapter(seed=7))
    work = reserve("r", rig.known[0]).work
    rig.door.on_message(A, Prefill(work, 3, WorkerRef("d", "1"), "", 0))
    await rig.settled(lambda: bool(rig.refused))
    (refused,) = rig.refused
    assert (refused.prefill_try, refused.is_retryable) == (3, False)
    assert rig.known[0].path not in refused.reason, "a client learns no path"
    assert not rig.passed


async def test_whatever_fails_while_one_is_read_its_work_is_refused_and_its_room_is_free(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: Adapter) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(rig.adapters, "load", load)
        for number in range(3):
            rig.door.on_message(A, reserve(str(number), rig.known[number % 2]))
        await rig.settled(lambda: len(rig.refused) == 3)
    assert {(each.is_retryable, each.reason) for each in rig.refused} == {
        (True, "the adapter cannot be loaded; the log of the worker says why")
    }
    await rig.used(0, 1)


async def test_ranks_take_no_adapters(tmp_path: Path) -> None:
    rig = Rig(write_tiny_model(tmp_path / "tiny"), tmp_path / "adapters", max_loras=0)
    rig.door.on_message(A, reserve("r", rig.known[0]))
    assert "tensor_parallel_size" in rig.refused[0].reason
    await asyncio.sleep(0)
    assert not rig.passed
