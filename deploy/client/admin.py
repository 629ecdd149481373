"""Talks to a router's administration API, for commands that look at a cluster or change it. Standard library only."""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.client.addresses import mistaken_url, router_url
from deploy.client.credentials import ADMIN_KEY_FILE_VARIABLE, ADMIN_KEY_VARIABLE, admin_key_of_environment
from deploy.client.tls import CA_VARIABLE, open_directly

TIMEOUT_S = 10.0


class AdminFailed(Exception):
    """The router refused or could not be reached; the message says which."""


class Unhealthy(Exception):
    """The router answers, but the cluster is not (yet) as it should be."""


class AdminClient:
    """One router, by its HTTP address; `key` is its admin key, by default the one in the environment.

    `cert_file`: the one certificate to believe; without it, https is checked against the CA of the environment.
    """

    def __init__(self, url: str, key: str | None = None, cert_file: str = "") -> None:
        self._url = router_url(url)
        self._cert_file = cert_file
        self._key = admin_key_of_environment() if key is None else key

    def state(self) -> dict[str, Any]:
        """Everything about the workers."""
        state: dict[str, Any] = self._call("GET", "/admin/v1/state")
        return state

    def record(self, request_id: str) -> dict[str, Any]:
        """Everything the router remembers of a request."""
        record: dict[str, Any] = self._call("GET", f"/admin/v1/requests/{urllib.parse.quote(request_id, safe='')}")
        return record

    def records(self) -> list[dict[str, Any]]:
        """The newest requests that the router remembers, newest first."""
        records: list[dict[str, Any]] = self._call("GET", "/admin/v1/requests")["requests"]
        return records

    def snapshots(self) -> Iterator[dict[str, Any]]:
        """What the router knows, twice a second until the caller leaves. Raises AdminFailed when it goes away."""
        request = urllib.request.Request(f"{self._url}/admin/v1/events", headers=self._headers())
        try:
            with self._open(request) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        yield json.loads(line[6:])
        except urllib.error.HTTPError as error:
            raise AdminFailed(_message(error.code, error.read())) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._no_answer(error) from error
        raise AdminFailed(f"the router at {self._url} has closed the stream")

    def readiness(self) -> dict[str, Any]:
        """Whether a request would be served, and if not, why."""
        readiness: dict[str, Any] = self._call("GET", "/ready", ok=(200, 503))
        return readiness

    def model_name(self) -> str:
        """What the API calls the model."""
        return str(next(self.snapshots())["router"]["model"])

    def scale(self, sizes: Mapping[str, int]) -> None:
        self._call("POST", "/admin/v1/pools", sizes)

    def drain(self, worker_id: str, grace_s: float | None) -> None:
        body = {} if grace_s is None else {"grace_s": grace_s}
        self._call("POST", f"/admin/v1/workers/{worker_id}/drain", body)

    def _call(self, method: str, path: str, body: Mapping[str, object] | None = None, ok: tuple[int, ...] = ()) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data=data, headers=self._headers(), method=method)
        try:
            with self._open(request) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            content = error.read()
            if error.code in ok:
                return json.loads(content)
            raise AdminFailed(_message(error.code, content)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._no_answer(error) from error

    def _open(self, request: urllib.request.Request) -> Any:
        return open_directly(request, TIMEOUT_S, self._cert_file)

    def _headers(self) -> dict[str, str]:
        return {"content-type": "application/json", **({"x-admin-key": self._key} if self._key else {})}

    def _no_answer(self, error: Exception) -> AdminFailed:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            text = f"the certificate of {self._url} is not trusted ({reason.verify_message}): put its CA into"
            return AdminFailed(f"{text} ${CA_VARIABLE}")
        return AdminFailed(mistaken_url(self._url))


def _message(status: int, content: bytes) -> str:
    if status == 401:
        variables = f"${ADMIN_KEY_VARIABLE}, or its file into ${ADMIN_KEY_FILE_VARIABLE}"
        return f"the router asks for its admin key: put it into {variables}"
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the router answered {status}"
