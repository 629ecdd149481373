"""Our channels on a machine whose environment names a proxy."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from common.wire.grpc_options import channel_options, server_options
from tests.ports import free_port
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_channel_of_ours_uses_no_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens where the proxy would be."""
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            grpc.channel_ready_future(channel).result(timeout=LIMIT_S)
    finally:
        server.stop(None).wait()
