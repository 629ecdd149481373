"""The HTTP front end over a scripted service, on a real loopback port."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai

from common.cluster.prefix_index.stats import WorkerIndexStats
from common.cluster.reports import RouterReport
from common.values.ids import WorkerRef
from common.values.request import FinishReason
from router.front.frontend import Frontend
from router.front.http.admin import AdminHooks
from router.front.http.connections import Connections
from router.front.http.generation import HttpSettings
from router.front.http.listening import HttpServer
from router.front.http.server import build_app
from router.front.ports import bind
from router.request.dialect import Dialect
from router.request.served_model import ServedModel
from router.request.validation import Validator
from router.tenants.access import Access, AdminKey
from router.tenants.tenants import Tenants
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import PromptTokenizer
from tests.router.front.scripted_service import ScriptedService, always
from tests.router.text.tokenizers_for_tests import CHATML, EOS_ID, IM_END_ID, byte_ids, byte_tokenizer
from tests.waiting import until

MODEL = ServedModel(
    name="tiny",
    path="/models/tiny",
    architecture="llama",
    max_model_len=512,
    vocab_size=300,
    eos_token_ids=(EOS_ID, IM_END_ID),
    generation_defaults={},
    created_s=1_700_000_000,
)
SETTINGS = HttpSettings(max_body_bytes=1 << 20, keep_alive_s=15.0)
_TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return byte_ids(_TOKENIZER, text)


def build_frontend(service: ScriptedService, model: ServedModel = MODEL, deadline_s: float = 10.0) -> Frontend:
    template = ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = PromptTokenizer(_TOKENIZER, template)
    return Frontend(service, tokenizer, model, Validator(model, deadline_s, random.Random(7), ids))


def open_access(admin_key: str = "") -> Access:
    """No API keys."""
    return Access(Tenants(), AdminKey(admin_key))


async def in_flight(frontend: Frontend, num_requests: int) -> None:
    """Wait until exactly so many requests are being answered."""

    async def is_so() -> bool:
        return frontend.in_flight.num_requests == num_requests

    await until(is_so)


@dataclass
class HttpRig:
    url: str
    port: int
    frontend: Frontend
    client: httpx.AsyncClient
    scaled: list[dict[str, int]]
    server: HttpServer
    _openai: Any = None

    @property
    def openai(self) -> Any:
        """An `openai.AsyncOpenAI`; its overloads take no dictionaries, hence Any."""
        if self._openai is None:
            self._openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        return self._openai

    async def close(self) -> None:
        if self._openai is not None:
            await self._openai.close()

    async def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        return await self.client.post(path, json=body)


@asynccontextmanager
async def http_rig(
    service: ScriptedService,
    settings: HttpSettings = SETTINGS,
    model: ServedModel = MODEL,
    access: Access | None = None,
    room: Connections | None = None,
    deadline_s: float = 10.0,
) -> AsyncIterator[HttpRig]:
    frontend = build_frontend(service, model, deadline_s)
    scaled: list[dict[str, int]] = []

    async def scale(sizes: Mapping[str, int]) -> None:
        scaled.append(dict(sizes))

    async def pool_status() -> dict[str, object]:
        return {"decode": {"desired": 2}}

    listener = bind("127.0.0.1", 0, "--http-port")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def routers() -> list[RouterReport]:
        state = service.state()
        load = state.num_running, state.num_queued
        me = RouterReport("router-a", url, "127.0.0.1:50051", service.router_pid, True, *load)
        return [me, *service.other_routers]

    def index_stats(workers: Sequence[WorkerRef]) -> Sequence[WorkerIndexStats] | None:
        return service.index_stats

    exposition = b"pdserve_requests_running 0\n"
    hooks = AdminHooks(
        lambda: exposition, "0.1.0", scale, pool_status, routers, lambda: service.loading, "router-a", index_stats
    )
    server = HttpServer(build_app(frontend, settings, hooks, access or open_access()), listener, room=room)
    serving = asyncio.ensure_future(server.serve())
    # No TLS here, and reading the certificates of a client's default takes longer than a test.
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
        rig = HttpRig(url, server.port, frontend, client, scaled, server)
        yield rig
        await rig.close()
    server.stop()
    await serving
    assert frontend.in_flight.num_requests == 0


def saying(text: str, reason: FinishReason = FinishReason.STOP) -> ScriptedService:
    """Answers everything with that text."""
    return always([*ids(text), EOS_ID] if reason is FinishReason.STOP else ids(text), reason)


@asynccontextmanager
async def rig_of(service: ScriptedService, **dialect: Any) -> AsyncIterator[HttpRig]:
    """A model whose dialect is that, with room for tools in its context."""
    async with http_rig(service, model=replace(MODEL, max_model_len=2048, dialect=Dialect(**dialect))) as rig:
        yield rig
