"""The HTTP application: which path is answered by what. FastAPI is the shell; bodies are read and written as bytes.

No body is checked against a schema at run time, and no page of the framework's own is offered. The paths that
generate are answered without the framework: its layers would be called again for every event of a stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.front.frontend import Frontend
from router.front.http.adapters import AdapterEndpoints
from router.front.http.admin import AdminEndpoints, AdminHooks
from router.front.http.events import StateFeed
from router.front.http.gate import HttpGate
from router.front.http.generation import GenerationEndpoints, HttpSettings
from router.front.http.io import REQUEST_ID_HEADER, Endpoint, guarded, json_response, request_id_of
from router.front.http.openapi import DescriptionEndpoints
from router.front.http.responses import ResponseEndpoint
from router.front.http.ui import PageEndpoints
from router.front.openai.responses import ErrorBody, ErrorInfo
from router.tenants.access import Access, Need

_Route = tuple[str, Endpoint, Need, tuple[str, ...]]
# Its spans would hold paths and exceptions; ours are written where we know what is in them.
_NO_FRAMEWORK_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
# A page may read those of a few plain kinds, and these.
_EXPOSED_HEADERS = [
    *(REQUEST_ID_HEADER, "retry-after", "retry-after-ms", "server-timing", "x-pdserve-cached-tokens"),
    *("x-pdserve-decode-worker", "x-pdserve-prefill-worker"),
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
]
_ERROR_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(frontend: Frontend, settings: HttpSettings, hooks: AdminHooks, access: Access) -> ASGIApp:
    """All routes over one front end. Call it inside the event loop that serves."""
    gate = HttpGate(access)
    generation, responses = GenerationEndpoints(frontend, settings), ResponseEndpoint(frontend, settings)
    admin = AdminEndpoints(frontend, hooks, settings.max_body_bytes, gate)
    adapters = AdapterEndpoints(frontend, hooks, settings.max_body_bytes)
    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, telemetry=_NO_FRAMEWORK_TELEMETRY
    )
    generation_routes, admin_routes = (
        _generation_routes(generation, responses),
        _admin_routes(admin, StateFeed(frontend, hooks)),
    )
    page_routes = _page_routes(PageEndpoints(), DescriptionEndpoints(hooks.version))
    routes = [*generation_routes, *_probe_routes(admin), *page_routes, *admin_routes, *_adapter_routes(adapters)]

    def answer(endpoint: Endpoint, need: Need) -> Endpoint:
        return guarded(gate.protected(endpoint, need), frontend.note_refusal)

    app.router.routes.extend(
        Route(path, answer(endpoint, need), methods=list(methods)) for path, endpoint, need, methods in routes
    )
    app.add_exception_handler(HTTPException, _http_error)
    application = _Application(app, {path: answer(endpoint, need) for path, endpoint, need, _ in generation_routes})
    return _OpenToSites(application, settings.allowed_origins) if settings.allowed_origins else application


class _Application:
    """A POST to one of `direct` is answered here, everything else by the framework."""

    def __init__(self, app: ASGIApp, direct: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class _OpenToSites:
    """For pages of other sites in a browser: their preflights are answered here, without a key, and what they ask is
    answered with the headers that let them read it. Never the administration."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._open_app = CORSMiddleware(
            app,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and not scope["path"].startswith(("/admin/", "/ui"))
        await (self._open_app if is_open else self._app)(scope, receive, send)


def _generation_routes(generation: GenerationEndpoints, responses: ResponseEndpoint) -> list[_Route]:
    return [
        ("/v1/chat/completions", generation.chat, Need.TENANT, ("POST",)),
        ("/v1/completions", generation.completions, Need.TENANT, ("POST",)),
        ("/v1/responses", responses.create, Need.TENANT, ("POST",)),
    ]


def _probe_routes(admin: AdminEndpoints) -> list[_Route]:
    return [
        ("/health", admin.ready, Need.PUBLIC, ("GET",)),
        ("/ready", admin.ready, Need.PUBLIC, ("GET",)),
        ("/live", admin.live, Need.PUBLIC, ("GET",)),
        ("/ping", admin.ready, Need.PUBLIC, ("GET", "POST")),
        ("/version", admin.version, Need.TENANT, ("GET",)),
        ("/load", admin.load, Need.OPERATOR, ("GET",)),
        ("/metrics", admin.metrics, Need.OPERATOR, ("GET",)),
        ("/v1/models", admin.models, Need.TENANT, ("GET",)),
        ("/v1/models/{model:path}", admin.model, Need.TENANT, ("GET",)),
        ("/tokenize", admin.tokenize, Need.TENANT, ("POST",)),
        ("/detokenize", admin.detokenize, Need.TENANT, ("POST",)),
    ]


def _page_routes(page: PageEndpoints, description: DescriptionEndpoints) -> list[_Route]:
    return [
        ("/openapi.json", description.document, Need.PUBLIC, ("GET",)),
        ("/docs", description.page, Need.PUBLIC, ("GET",)),
        ("/", page.redirect, Need.PUBLIC, ("GET",)),
        ("/ui", page.redirect, Need.PUBLIC, ("GET",)),
        ("/ui/", page.file, Need.PUBLIC, ("GET",)),
        ("/ui/{name}", page.file, Need.PUBLIC, ("GET",)),
    ]


def _admin_routes(admin: AdminEndpoints, feed: StateFeed) -> list[_Route]:
    return [
        ("/admin/v1/events", feed.events, Need.ADMIN, ("GET",)),
        ("/admin/v1/state", admin.state, Need.ADMIN, ("GET",)),
        ("/admin/v1/requests", admin.requests, Need.ADMIN, ("GET",)),
        ("/admin/v1/requests/{request_id:path}", admin.request, Need.ADMIN, ("GET",)),
        ("/admin/v1/workers/{worker_id}/drain", admin.drain, Need.ADMIN, ("POST",)),
        ("/admin/v1/pools", admin.scale_both, Need.ADMIN, ("POST",)),
        ("/admin/v1/pools/{role}", admin.scale, Need.ADMIN, ("POST",)),
    ]


def _adapter_routes(adapters: AdapterEndpoints) -> list[_Route]:
    return [
        ("/admin/v1/adapters", adapters.all, Need.ADMIN, ("GET",)),
        ("/admin/v1/adapters", adapters.load, Need.ADMIN, ("POST",)),
        ("/admin/v1/adapters/{name:path}", adapters.unload, Need.ADMIN, ("DELETE",)),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    code = _ERROR_CODES.get(error.status_code, "bad_request")
    body = ErrorBody(
        ErrorInfo(f"{request.method} {request.url.path[:128]}: {error.detail}", "not_found_error", None, code)
    )
    headers = {REQUEST_ID_HEADER: request_id_of(request), **(error.headers or {})}
    return json_response(body, error.status_code, headers)
