"""The router's benchmark measures what it says, at a hundredth of its size."""

import shutil

import pytest

from tests.bench import router_bench
from tests.redis_box import binaries

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not binaries() and not shutil.which("redis-server"), reason="no Redis on this machine"),
]


def test_every_figure_is_there_and_belongs_together() -> None:
    """Each case has its latencies and its load; streams add to the first byte too; a core does 1000 ms a second."""
    rows = router_bench.run(scale=0.03)
    by_name = {row["metric"]: row for row in rows}
    num_parts = sum(1 + case.stream for case in router_bench.CASES)
    assert len(by_name) == len(rows) == 2 * num_parts + 3 * len(router_bench.CASES)
    assert all(set(row) == {"metric", "unit", "ours", "peers", "floor", "better"} for row in rows)
    for case in router_bench.CASES:
        name = f"router, {router_bench.NUM_CONNECTIONS} connections, {case.name}"
        processor_ms = by_name[f"{name}: processor time"]["ours"]
        assert processor_ms > 0.1, "less than encoding the prompt takes"
        assert by_name[f"{name}: per core"]["ours"] == pytest.approx(1e3 / processor_ms, rel=0.01)
        whole_ms = by_name[f"router, {case.name}: added to the last byte, p50"]["peers"]["whole"]
        assert whole_ms > 0.5 * (case.num_tokens - 1) * 1e3 * router_bench.STEP_S
