"""The description of the HTTP API: `/openapi.json` for programs, `/docs` for people. Made once, of the very structures
that bodies are read into and answers are written from, so what it says of a field is what the field does.

The page loads nothing and runs no script.
"""

import html
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.front.openai.fields import NEUTRAL, Ignored, NotOffered, fields_of
from router.front.openai.items.answers import ResponseAnswer
from router.front.openai.items.requests import ItemStreamOptions, ReasoningOptions, ResponseBody, TextOptionsBody
from router.front.openai.requests import (
    ChatBody,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    MessageBody,
    StreamOptions,
    TokenizeBody,
)
from router.front.openai.responses import (
    Answer,
    ChatChoice,
    CompletionChoice,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizeAnswer,
)

_REFERENCE = "#/components/schemas/{name}"
_BODIES = (
    *(ChatBody, CompletionBody, ResponseBody, TokenizeBody, DetokenizeBody, StreamOptions, MessageBody, ContentPart),
    *(TextOptionsBody, ReasoningOptions, ItemStreamOptions),
)
_OBJECT = {"type": "object"}


class _Operation(NamedTuple):
    """`answer` None: not JSON, or of a form that may change."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    media_type: str = "application/json"


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a conversation, whole or as a stream of server-sent events.",
               ChatBody, Answer[ChatChoice]),
    _Operation("post", "/v1/completions", "Continue texts or token ids, whole or as a stream of server-sent events.",
               CompletionBody, Answer[CompletionChoice]),
    _Operation("post", "/v1/responses", "Answer a conversation of items, whole or as a stream of server-sent events.",
               ResponseBody, ResponseAnswer),
    _Operation("get", "/v1/models", "The model that is served.", answer=ModelList),
    _Operation("get", "/v1/models/{model}", "The model, if it is served.", answer=ModelCard),
    _Operation("post", "/tokenize", "Token ids of a text or a conversation.", TokenizeBody, TokenizeAnswer),
    _Operation("post", "/detokenize", "The text of token ids.", DetokenizeBody),
    _Operation("get", "/health", "Whether a request would be served: 200 or 503. /ready and /ping say the same."),
    _Operation("get", "/live", "That the process answers."),
    _Operation("get", "/version", "The version of pdserve."),
    _Operation("get", "/load", "How many requests are being answered."),
    _Operation("get", "/metrics", "For Prometheus.", media_type="text/plain"),
)  # fmt: skip


def description(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document. Of administration and the page see docs/."""
    paths: dict[str, Any] = {}
    structs = {each for operation in _OPERATIONS for each in (operation.body, operation.answer) if each is not None}
    types = sorted([*structs, ErrorBody], key=str)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
    for body in _BODIES:
        _describe_unused(body, components[body.__name__])
    for component in components.values():
        if component.get("additionalProperties") is False:
            component["additionalProperties"] = {"type": "null"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _described(operation: _Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer = {operation.media_type: {"schema": schema_of[operation.answer] if operation.answer else {}}}
    if operation.body in (ChatBody, CompletionBody, ResponseBody):
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "An error.", "content": {"application/json": {"schema": schema_of[ErrorBody]}}}
    if operation.path == "/health":
        error["content"] = {"application/json": {"schema": _OBJECT}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "As asked.", "content": answer}, "default": error},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _describe_unused(body: type[msgspec.Struct], schema: dict[str, Any]) -> None:
    for name in fields_of(body, Ignored):
        schema["properties"][name] = {"description": "Accepted, without effect.", "default": None}
    for name in fields_of(body, NotOffered):
        values = [None, *NEUTRAL.get(name, ())]
        schema["properties"][name] = {"enum": values, "description": "Not offered.", "default": None}


class DescriptionEndpoints:
    """Both forms, made at the start."""

    def __init__(self, version: str) -> None:
        document = description(version)
        self._document = msgspec.json.encode(document)
        self._page = "".join(_page(document))

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return Response(self._page, media_type="text/html", headers={"content-security-policy": policy})


_STYLE = "body{font:1rem/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding:0 1.5rem 0 0}"


def _page(document: dict[str, Any]) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>pdserve API</title><style>{_STYLE}</style>"
    yield "<h1>pdserve API</h1><p>For programs: <a href=openapi.json>openapi.json</a>.</p>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(operation['summary'])}</p>"
            if "requestBody" in operation:
                yield _link(operation["requestBody"]["content"]["application/json"]["schema"])
    for name, schema in document["components"]["schemas"].items():
        yield f"<h3 id={name}>{name}</h3><p>{html.escape(schema.get('description', ''))}</p><table>"
        for field, of_field in schema.get("properties", {}).items():
            required = "required" if field in schema.get("required", ()) else ""
            about = html.escape(of_field.get("description", ""))
            yield f"<tr><td><code>{field}</code><td>{_type_text(of_field)}<td>{required}{about}"
        yield "</table>"
    yield "</html>"


def _link(schema: dict[str, Any]) -> str:
    name = schema["$ref"].rpartition("/")[2]
    return f"<a href=#{name}>{name}</a>"


def _type_text(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_text, schema["anyOf"])))
    if "enum" in schema:
        return html.escape(", ".join(msgspec.json.encode(value).decode() for value in schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]}" for key, word in _LIMITS.items() if key in schema]
    return html.escape(", ".join([schema.get("type", "anything"), *limits]))


_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
