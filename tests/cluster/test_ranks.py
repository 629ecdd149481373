"""Workers of several ranks in the whole service: any widths on both sides give the tokens of one process."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.cluster import running_cluster
from tests.cluster.load import random_cases, run_all, wrong

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


def widths(prefill: int, decode: int) -> dict[str, Any]:
    return {
        "router": {"pair_grace_s": 300},  # a busy machine takes its time to start three processes
        "prefill_worker": {"tensor_parallel_size": prefill, "block_size": 8},
        "decode_worker": {"tensor_parallel_size": decode},
    }


def ranks_of(worker: dict[str, Any]) -> list[psutil.Process]:
    """The processes of a worker's other ranks."""
    return [child for child in psutil.Process(worker["pid"]).children() if "rank_process" in " ".join(child.cmdline())]


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3), (2, 2)], ids=str)
async def test_output_does_not_depend_on_either_width(tiny_model: Path, prefill: int, decode: int) -> None:
    with running_cluster(tiny_model, *DISAGGREGATED, config=widths(prefill, decode)) as cluster:
        found = [len(ranks_of(*cluster.workers(role))) for role in ("prefill", "decode")]
        assert found == [prefill - 1, decode - 1]
        for worker in cluster.workers():
            pids = [worker["pid"], *(rank.pid for rank in ranks_of(worker))]
            assert sorted(rank["pid"] for rank in worker["ranks"]) == sorted(pids)
        lines = cluster.cli("status").stdout
        assert lines.count("alive") == sum(width for width in (prefill, decode) if width > 1)
        cases = random_cases(12, seed=5)
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []
        records = cluster.get("/admin/v1/requests?limit=12")["requests"]
        assert {record["attempts"][-1]["is_local"] for record in records} == {False}
        sides = [f" of {width} ranks" * (width > 1) for width in (prefill, decode)]
        said = "prefill prefill-0{}, decode decode-0{}: finished".format(*sides)
        assert said in cluster.cli("explain", "--last").stdout


async def test_a_rank_killed_under_load_ends_its_worker_and_changes_no_token(tiny_model: Path) -> None:
    """1 -> 2 ranks. 1. load; 2. kill -9 the decode worker's rank 1; 3. the worker ends too; 4. the same tokens."""
    cases = random_cases(20, seed=6, max_tokens=160)
    with running_cluster(tiny_model, *DISAGGREGATED, config=widths(1, 2)) as cluster:
        (victim,) = cluster.workers("decode")
        process = psutil.Process(victim["pid"])
        load = asyncio.create_task(run_all(cluster.url, "tiny", cases))
        await asyncio.to_thread(cluster.wait_for, lambda state: state["num_running"], bool)
        os.kill(victim["ranks"][1]["pid"], signal.SIGKILL)
        await asyncio.to_thread(process.wait, 60)
        assert not load.done()
        assert wrong(tiny_model, cases, await load) == []
        await asyncio.to_thread(cluster.wait_for_pools, 1, 1)
        (successor,) = cluster.workers("decode")
        assert {rank["pid"] for rank in successor["ranks"]}.isdisjoint(rank["pid"] for rank in victim["ranks"])
