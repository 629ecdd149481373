"""What holds for every test."""

import os

# Before torch is imported: tensors here are tiny, and threads that wait for one another at each of them cost six times
# as much as they save. Workers of real clusters are given theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from common.cluster import leased_reports, pools, registry
from common.cluster.prefix_index import mirror, writer
from deploy.worker.env import SHORT_LOOKUPS
from tests.waiting import LIMIT_S

# As real workers have it: links stand soon although no name server answers.
os.environ.setdefault("RES_OPTIONS", SHORT_LOOKUPS)


@pytest.fixture(scope="session", autouse=True)
def patient_redis_clients() -> Iterator[None]:
    """A busy machine may keep a test from hearing an answer within the tenths of a second that users are spared from.

    What a client does that waited in vain is tested where it happens at once: on a Redis that has ended, and on a
    look-up's own budget.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (leased_reports, pools, mirror, registry, writer):
            patch.setattr(module, "TIMEOUT_S", LIMIT_S)
        yield
