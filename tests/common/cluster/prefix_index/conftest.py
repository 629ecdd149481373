import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from common.cluster.keys import MEMBER_BYTES, Keys
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


class Truth:
    """What Redis has, looked up there and then."""

    def __init__(self, url: str, namespace: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._keys = Keys(namespace)

    async def longest_prefix(self, hashes: Sequence[BlockHash], workers: Sequence[WorkerRef]) -> dict[WorkerRef, int]:
        """Leading blocks of each worker with a lease, those with at least one."""
        depths = {ref: self._depth(hashes, ref) for ref in workers if self._redis.exists(self._keys.lease(ref))}
        return {ref: depth for ref, depth in depths.items() if depth}

    def _depth(self, hashes: Sequence[BlockHash], ref: WorkerRef) -> int:
        key = self._keys.members(ref)
        if self._redis.type(key) != b"set":
            return 0
        held = self._redis.smembers(key)
        return next((idx for idx, each in enumerate(hashes) if each[:MEMBER_BYTES] not in held), len(hashes))

    async def close(self) -> None:
        self._redis.close()
