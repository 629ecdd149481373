"""The service's output is the reference's, token for token, however the work is spread.

Each cluster shape answers all 24 prompts at once and one half of them alone, which takes most of the time; over both
APIs, cold and warm. The third shape is that of `test_openai_client`.
"""

from pathlib import Path

from tests.cluster.cluster import running_cluster
from tests.cluster.golden import load_goldens, mismatches_alone, mismatches_together, over_grpc, over_http, pools

GOLDENS = load_goldens()
HALVES = GOLDENS[::2], GOLDENS[1::2]
FLOAT32 = ("--dtype", "float32")
DISAGGREGATED = (*FLOAT32, "--local-prefill-max-tokens", "0")


async def test_one_pair_disaggregated(demo_model: Path) -> None:
    """1. cold, alone, gRPC; 2. half of them warm, all at once, HTTP; chunk 512, blocks 16/16."""
    with running_cluster(demo_model, *DISAGGREGATED, config=pools(16, 16, 512)) as cluster:
        assert await mismatches_alone(HALVES[0], over_grpc, cluster.grpc) == []
        cluster.audit()
        assert await mismatches_together(GOLDENS, over_http, cluster.url) == []


async def test_prefill_on_the_decode_worker(demo_model: Path) -> None:
    """Everything local: cold all at once over gRPC, then warm alone over HTTP; chunk 64."""
    options = (*FLOAT32, "--local-prefill-max-tokens", "100000")
    with running_cluster(demo_model, *options, config=pools(16, 16, 64)) as cluster:
        assert await mismatches_together(GOLDENS, over_grpc, cluster.grpc) == []
        cluster.audit()
        assert await mismatches_alone(HALVES[1], over_http, cluster.url) == []
