"""A collector of traces on a real port."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict


def _as_json(body: bytes) -> dict[str, Any]:
    """As OTLP's JSON has it: ids are hexadecimal."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = MessageToDict(ExportTraceServiceRequest.FromString(body))
    for resource in message["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            for name in ("traceId", "spanId", "parentSpanId"):
                span[name] = base64.b64decode(span.get(name, "")).hex()
    return message


class Collector:
    """Keeps what it gets; answers with `status`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.bodies.append(_as_json(body))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(collector.status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def request_ids(self) -> list[str]:
        """Of the root spans, in order."""
        spans = [
            span for body in self.bodies for each in body["resourceSpans"] for span in each["scopeSpans"][0]["spans"]
        ]
        roots = [span for span in spans if span["name"] == "pdserve.generate"]
        attributes = [{each["key"]: each["value"] for each in root["attributes"]} for root in roots]
        return [each["gen_ai.response.id"]["stringValue"] for each in attributes]
