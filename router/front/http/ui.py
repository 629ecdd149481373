"""The operator's page at `/ui/`: files of `page/`, read once, served as they are. Owns them and their policy.

The page may load from this router only; it is in no frame, and no script is in its markup.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from common.values.errors import InvalidRequest
from router.front.http.io import error_response, request_id_of

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time, and get a 304
}


class NoSuchFile(InvalidRequest):
    http_status = 404
    error_type = "not_found_error"
    code = "not_found"
    reason = "NOT_FOUND"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class PageEndpoints:
    """A name that is no file of the page is not found, whatever it looks like."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.suffix in _MEDIA_TYPES}

    async def redirect(self, request: Request) -> Response:
        """To the page, relative: a proxy may have put a prefix before us."""
        return RedirectResponse("ui/", 307)

    async def file(self, request: Request) -> Response:
        file = self._files.get(request.path_params.get("name") or INDEX)
        if file is None:
            return error_response(NoSuchFile("the page has no such file"), request_id_of(request))
        headers = {**_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
