"""A decode worker's half in a process of its own, to be killed or frozen."""

import asyncio
import os
import subprocess
import sys
from types import TracebackType

import grpc

from common.values.ids import WorkerRef
from common.wire.grpc_options import server_options
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.session import SessionSettings
from tests.kvtransfer.cluster import FINGERPRINT, Changed, Decode, new_cache, new_transfer_id

REF = WorkerRef("decode-1", "cc")


class DecodeChild:
    """Expects one request of 100 tokens. Only this process, which it started, is ever killed."""

    def __init__(self, request: str, transport: str = "gloo") -> None:
        self._request = request
        self._transport = transport
        self.ref = REF

    async def __aenter__(self) -> "DecodeChild":
        self.process = _spawn(self._request, self._transport)
        assert self.process.stdout is not None
        self.address = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        assert self.address.startswith("127.0.0.1:")
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _spawn(request: str, transport: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvtransfer.decode_child", request, transport]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


async def _serve(request: str, transport: str) -> None:
    kv = new_cache(32)
    planner = ChunkPlanner(kv.spec, 2048)
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    settings = SessionSettings(REF, FINGERPRINT, kv, max_inflight_bytes=3000, transport=transport)
    decode = Decode(settings, planner, Changed())
    decode.sessions.add_to(server)
    await server.start()
    decode.expect(new_transfer_id(request), (4, 0, 6, 3), 100)
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2]))
