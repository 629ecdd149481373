"""`/admin/v1/adapters`: which LoRA adapters are served, loading and unloading them."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.values.errors import InvalidRequest
from router.front.frontend import Frontend
from router.front.http.admin import AdminHooks
from router.front.http.io import json_response, read_json
from router.front.openai.json_body import parse_body
from router.request.adapters import ServedAdapter


class AdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str


_BODY = msgspec.json.Decoder(AdapterBody)


class AdapterEndpoints:
    """Stateless."""

    def __init__(self, frontend: Frontend, hooks: AdminHooks, max_body_bytes: int) -> None:
        self._frontend = frontend
        self._hooks = hooks
        self._max_body_bytes = max_body_bytes

    async def all(self, request: Request) -> Response:
        return json_response({"adapters": [_shown(each) for each in self._frontend.validator.adapters.all]})

    async def load(self, request: Request) -> Response:
        """Serve the adapter in a directory as a model. One that is served already, by the same name, stays."""
        body = parse_body(await read_json(request, self._max_body_bytes), _BODY)
        if self._hooks.load_adapter is None:
            raise InvalidRequest("adapters are not managed by this process", param="name")
        served = await self._hooks.load_adapter(body.name, body.path)
        self._frontend.service.events.add("adapter", f"{body.name} is served, by the admin API")
        return json_response(_shown(served))

    async def unload(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._frontend.validator.check_model(name) is None or self._hooks.unload_adapter is None:
            raise InvalidRequest(f"{name[:128]!r} is no adapter", param="name")
        await self._hooks.unload_adapter(name)
        self._frontend.service.events.add("adapter", f"{name} is served no more, by the admin API")
        return json_response({"name": name, "state": "unloaded"})


def _shown(served: ServedAdapter) -> dict[str, object]:
    adapter = served.adapter
    return {"name": served.name, "path": adapter.path, "digest": adapter.digest, "created": served.created_s}
