"""Everything over HTTP that is not generation: probes, model card, tokenize, metrics, administration."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.cluster.prefix_index.stats import WorkerIndexStats
from common.cluster.reports import LoadingWorker, RouterReport
from common.values.errors import InvalidRequest, RequestNotFound, WorkerNotFound
from common.values.ids import RequestId, WorkerRef
from router.front.frontend import Frontend
from router.front.http.gate import HttpGate
from router.front.http.io import json_response, read_json
from router.front.openai.json_body import parse_body
from router.front.openai.prompts import chat_prompt
from router.front.openai.requests import DetokenizeBody, TokenizeBody
from router.front.openai.responses import ModelCard, ModelList, TokenizeAnswer
from router.front.openai.tools import checked_tools
from router.request import limits
from router.request.adapters import ServedAdapter
from router.request.spec import Prompt, TextPrompt

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_NUM_RECORDS = 100
DEFAULT_DRAIN_GRACE_S = 30.0

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
ScalePools = Callable[[Mapping[str, int]], Awaitable[object]]
PoolStatus = Callable[[], Awaitable[object]]
Routers = Callable[[], Sequence[RouterReport]]
IndexStats = Callable[[Sequence[WorkerRef]], Sequence[WorkerIndexStats] | None]
Loading = Callable[[], Sequence[LoadingWorker]]


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    grace_s: float = DEFAULT_DRAIN_GRACE_S


class PoolBody(msgspec.Struct, forbid_unknown_fields=True):
    replicas: int


class PoolsBody(msgspec.Struct, forbid_unknown_fields=True):
    prefill: int | None = None
    decode: int | None = None


@dataclass(frozen=True, slots=True)
class AdminHooks:
    """What the process around us supplies.

    `scale_pools(sizes)` sets the desired size of one or both pools, where it can. `pool_status()` is what the pool
    controller last said, None when there is none. `routers()` is every router of the cluster, this one too,
    `loading()` every worker that is not ready yet, `index_stats` what each worker has in the prefix index.
    `load_adapter(name, path)` and `unload_adapter(name)` change what all routers serve.
    """

    exposition: Callable[[], bytes]
    version: str
    scale_pools: ScalePools | None = None
    pool_status: PoolStatus | None = None
    routers: Routers = tuple
    loading: Loading = tuple
    router_id: str = ""
    index_stats: IndexStats = lambda workers: None
    load_adapter: Callable[[str, str], Awaitable[ServedAdapter]] | None = None
    unload_adapter: Callable[[str], Awaitable[None]] | None = None


class AdminEndpoints:
    """Stateless views of the front end and its service."""

    def __init__(self, frontend: Frontend, hooks: AdminHooks, max_body_bytes: int, gate: HttpGate) -> None:
        self._frontend = frontend
        self._service = frontend.service
        self._hooks = hooks
        self._max_body_bytes = max_body_bytes
        self._gate = gate

    async def live(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 when a request would be served, else 503, with the reasons for those who may know them."""
        readiness = self._frontend.readiness()
        answer: dict[str, object] = {"status": "ready" if readiness.is_ready else "not ready"}
        if self._gate.may_know_details(request):
            answer["reasons"] = readiness.reasons
        return json_response(answer, 200 if readiness.is_ready else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._hooks.version})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._frontend.in_flight.num_requests})

    async def metrics(self, request: Request) -> Response:
        return Response(self._hooks.exposition(), media_type=_PROMETHEUS)

    async def models(self, request: Request) -> Response:
        adapters = self._frontend.validator.adapters.all
        return json_response(ModelList([self._model_card(), *map(self._adapter_card, adapters)]))

    async def model(self, request: Request) -> Response:
        served = self._frontend.validator.check_model(request.path_params["model"])
        return json_response(self._model_card() if served is None else self._adapter_card(served))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, _TOKENIZE)
        self._frontend.validator.check_model(body.model or "")
        token_ids = await self._frontend.tokenize(_prompt_of(body))
        strings = await self._frontend.token_strings(token_ids) if body.return_token_strs else None
        max_model_len = self._frontend.model.max_model_len
        return json_response(TokenizeAnswer(len(token_ids), max_model_len, list(token_ids), strings))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, _DETOKENIZE)
        self._frontend.validator.check_model(body.model or "")
        return json_response({"prompt": await self._frontend.detokenize(body.tokens, "tokens")})

    async def state(self, request: Request) -> Response:
        state = self._service.state()
        pools = None if self._hooks.pool_status is None else await self._hooks.pool_status()
        return json_response(
            {
                "workers": state.workers,
                "num_queued": state.num_queued,
                "num_running": state.num_running,
                "pools": pools,
                "routers": self._hooks.routers(),
                "loading": self._hooks.loading(),
            }
        )

    async def requests(self, request: Request) -> Response:
        return json_response({"requests": self._service.request_records(_NUM_RECORDS)})

    async def request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        record = self._service.request_record(RequestId(request_id))
        if record is None:
            raise RequestNotFound(f"no request {request_id[:128]!r} is known")
        return json_response(record)

    async def drain(self, request: Request) -> Response:
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        body = await self._body(request, _DRAIN) if has_body else DrainBody()
        worker_id = request.path_params["worker_id"]
        if not 0 <= body.grace_s <= limits.MAX_DRAIN_GRACE_S:
            raise InvalidRequest(f"grace_s must be between 0 and {limits.MAX_DRAIN_GRACE_S:g}", param="grace_s")
        if not self._service.drain_worker(worker_id, body.grace_s):
            raise WorkerNotFound(f"no worker {worker_id[:128]!r} is known")
        return json_response({"worker_id": worker_id, "state": "draining"}, 202)

    async def scale(self, request: Request) -> Response:
        """Set the desired size of a pool, where this process can."""
        body = await self._body(request, _POOL)
        role = request.path_params["role"]
        if role not in ("prefill", "decode"):
            raise InvalidRequest("role must be prefill or decode", param="role")
        await self._scale({role: body.replicas}, "replicas")
        return json_response({"role": role, "replicas": body.replicas}, 202)

    async def scale_both(self, request: Request) -> Response:
        """Set both sizes at once: a worker that one pool has too many can then take the other's role."""
        body = await self._body(request, _POOLS)
        sizes = {"prefill": body.prefill, "decode": body.decode}
        wanted = {role: size for role, size in sizes.items() if size is not None}
        if not wanted:
            raise InvalidRequest("state prefill, decode or both", param="prefill")
        await self._scale(wanted, "")
        return json_response(wanted, 202)

    async def _scale(self, sizes: Mapping[str, int], param: str) -> None:
        for role, replicas in sizes.items():
            if not 0 <= replicas <= limits.MAX_REPLICAS:
                name = param or role
                raise InvalidRequest(f"{name} must be between 0 and {limits.MAX_REPLICAS}", param=name)
        if self._hooks.scale_pools is None:
            raise InvalidRequest("pools are not managed by this process", param="role")
        await self._hooks.scale_pools(sizes)
        text = ", ".join(f"{role} is to have {replicas}" for role, replicas in sizes.items())
        self._service.events.add("scale", f"{text}, by the admin API")

    def _model_card(self) -> ModelCard:
        model = self._frontend.model
        return ModelCard(
            model.name,
            model.created_s,
            model.name,
            model.max_model_len,
            dict(model.generation_defaults),
            model.dialect.tools or None,
            model.dialect.reasoning or None,
        )

    def _adapter_card(self, served: ServedAdapter) -> ModelCard:
        base, name = self._model_card(), served.name
        return msgspec.structs.replace(base, id=name, created=served.created_s, root=name, parent=base.id)

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
        return parse_body(await read_json(request, self._max_body_bytes), decoder)


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_DRAIN = msgspec.json.Decoder(DrainBody)
_POOL = msgspec.json.Decoder(PoolBody)
_POOLS = msgspec.json.Decoder(PoolsBody)


def _prompt_of(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("state either prompt or messages", param="prompt")
    if body.messages is not None:
        tools = checked_tools(body.tools or (), "tools")
        return chat_prompt(body.messages, body.chat_template_kwargs, body.add_generation_prompt, tools)
    return TextPrompt(body.prompt or "", body.add_special_tokens is not False)
