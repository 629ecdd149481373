"""Load sizes the pools of a real cluster: up while it lasts, down afterwards, and no request notices."""

import asyncio
import re
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong

CONFIG: dict[str, Any] = {
    "autoscale": {
        **{"enabled": True, "prefill_max": 1, "decode_max": 2, "target_tpot_s": 60},
        **{"up_window_s": 2, "stable_window_s": 6, "up_cooldown_s": 2, "down_cooldown_s": 2},
    },
    "decode_worker": {"max_num_seqs": 2},
}


async def test_a_pool_grows_under_load_and_shrinks_after_it_and_no_request_fails(tiny_model: Path) -> None:
    """1. six streams at once on a decode worker for two; 2. a second one comes; 3. quiet: it drains and goes."""
    with running_cluster(tiny_model, "--dtype", "float32", "--local-prefill-max-tokens", "0", config=CONFIG) as cluster:
        stop = asyncio.Event()
        load = asyncio.create_task(_load_until(stop, cluster))
        try:
            await asyncio.to_thread(cluster.wait_for_pools, 1, 2)
        finally:
            stop.set()
        cases, answers = await load
        await asyncio.to_thread(cluster.wait_for_pools, 1, 1)
        assert wrong(tiny_model, cases[-20:], answers[-20:]) == []
        assert all(answer for answer in answers)
        pool = cluster.get("/admin/v1/state")["pools"]["decode"]
        assert pool["num_crashes"] == 0
        changes = [(change["from"], change["to"]) for change in pool["autoscale"]["changes"]]
        assert changes == [(2, 1), (1, 2)]
        assert "sequences" in pool["autoscale"]["changes"][1]["reason"]
        status = cluster.cli("status").stdout
        assert "decode: autoscaled, 1 wanted: " in status
        assert re.search(r"2 -> 1: for 6 s at most: (idle|1 sequences, 0 of them queued)", status), status


async def _load_until(stop: asyncio.Event, cluster: Cluster) -> tuple[list[Case], list[Any]]:
    cases, answers, seed = [], [], 500
    while not stop.is_set():
        batch = random_cases(12, seed=seed, max_tokens=150)
        answers += await run_all(cluster.url, "tiny", batch, at_once=6)
        cases += batch
        seed += 1
    return cases, answers
