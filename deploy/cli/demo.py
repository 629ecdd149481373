"""`pdserve demo`: the main job in under a minute, on a cluster of its own that is gone afterwards."""

import asyncio
import socket
import time

from deploy.cli.commands import with_model
from deploy.cli.generate import Ask, print_answer
from deploy.cli.progress import progress
from deploy.config.settings import load_settings
from deploy.local.cluster import LocalCluster, run_local

QUESTION = "What is the capital of France? Answer in one sentence."
MAX_TOKENS = 48
_ANSWER_LIMIT_S = 60.0


def run_demo() -> int:
    """Start, ask, show, stop. The exit code of the command."""
    began_s = time.monotonic()
    http_port, grpc_port = _free_ports(2)
    # A question this short would be prefilled on the decode worker; the demo shows the handoff.
    disaggregated = {"router.local_prefill_max_tokens": 0}
    flags = {"router.http_port": http_port, "router.grpc_port": grpc_port, **disaggregated}
    config = with_model(load_settings(flags).config)
    progress("demo", "starting one prefill worker and one decode worker; about 15 seconds")
    code = run_local(config, progress, _ask)
    progress("demo", f"everything is stopped, no process is left; {time.monotonic() - began_s:.0f} s in all")
    progress("demo", "next: pdserve up keeps a cluster running and prints what to ask it")
    return code


async def _ask(cluster: LocalCluster) -> int:
    progress("demo", f"asking through gRPC on {cluster.grpc_address}: {QUESTION}")
    print(flush=True)
    question = Ask(QUESTION, is_chat=True, max_tokens=MAX_TOKENS, temperature=0.0)
    await asyncio.to_thread(print_answer, cluster.grpc_address, question, as_json=False, timeout_s=_ANSWER_LIMIT_S)
    print(flush=True)
    return 0


def _free_ports(count: int) -> list[int]:
    """So that the demo runs beside a cluster on the usual ports."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
