"""The real roles, one after the other in one process."""

import asyncio
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.values.config import ModelConfig, WorkerConfig
from common.worker.control import WorkerControl
from common.worker.lifecycle import Build, WorkerContext, run_worker
from common.worker.role import RoleShell
from deploy.worker.roles import build_of
from tests.caches import planes_of
from tests.tiny_model import write_tiny_model
from tests.waiting import until

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


def config_of(model: Path, role: Any, num_blocks: int) -> WorkerConfig:
    chosen: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": num_blocks}
    return WorkerConfig(role=role, worker_id=f"{role}-0", model=ModelConfig(path=str(model)), **chosen)


async def test_each_role_gives_up_the_memory_of_its_kv_cache_to_the_next(model: Path) -> None:
    """1. prefill; 2. decode with a larger cache, then prefill again; 3. of every earlier cache no page is left.

    A reader that still looks at one, as an ended role may until it is collected, sees zeros.
    """
    seen: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    ready: list[dict[str, Any]] = []
    control = WorkerControl(asyncio.get_running_loop(), ready.append)

    def noting(role: str) -> Build:
        def build(around: WorkerContext) -> RoleShell:
            seen.extend(plane.view(torch.uint8).flatten().fill_(1).numpy() for plane in planes_of(around.loaded.cache))
            shell = build_of(role)(around)
            assert isinstance(shell, RoleShell)
            return shell

        return build

    worker = asyncio.create_task(run_worker(config_of(model, "prefill", 80), control, noting))

    async def is_ready() -> bool:
        return bool(ready)

    await until(is_ready, LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        for role, num_blocks in (("decode", 160), ("prefill", 120)):
            description = await asyncio.wrap_future(control.request_role(config_of(model, role, num_blocks), 1.0))
            assert description["role"] == role
        ends_of_pages = 2 * mmap.PAGESIZE
        assert all(rows.nbytes > 2 * ends_of_pages for rows in seen)
        assert [np.count_nonzero(rows) <= ends_of_pages for rows in seen] == [True] * 4 + [
            False
        ] * 2  # two planes of each life
        control.request_drain(0.0)
        await worker
