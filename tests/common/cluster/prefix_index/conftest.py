import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cluster.protocol import Registration
from common.values.ids import BlockHash, WorkerRef
from common.values.messages import Role
from tests.redis_box import RedisBox, binaries, redis_box


@pytest.fixture(scope="module", params=binaries(), ids=lambda path: Path(path).name)
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    """A server for the module; a test that fills or kills it cleans up or uses `own_box`."""
    with redis_box(request.param, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_box(tmp_path: Path) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path) as server:
        yield server


def chain(name: str, num_blocks: int) -> list[BlockHash]:
    """Hashes as a prompt's blocks have them."""
    return [BlockHash(hashlib.sha256(f"{name}/{idx}".encode()).digest()) for idx in range(num_blocks)]


def registration(worker_id: str, incarnation: str = "a", role: Role = Role.PREFILL) -> Registration:
    return Registration(WorkerRef(worker_id, incarnation), role, "127.0.0.1:4000")
