"""An HTTP server in the place of an engine, for routers that only pass bytes on: answers completions at once.

A streamed answer has as many events as tokens were asked for, all in one go. Run as a module it prints its port.
"""

import asyncio
import json
from typing import Any

import uvloop

_TEXT = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "stub"}

# To whatever else is asked: health, the list of models, what the server runs.
_ABOUT = {"status": "ok", "model_path": "stub", "object": "list", "data": [{"id": "stub", "object": "model"}]}


def _choice(finish_reason: str | None) -> dict[str, Any]:
    return {**_TEXT, "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason}]}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            writer.write(_answer(body) if head.startswith(b"POST") else _whole(_ABOUT))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _answer(body: bytes) -> bytes:
    request = json.loads(body)
    if not request.get("stream"):
        return _whole({**_choice("length"), "usage": {"prompt_tokens": 400, "completion_tokens": 1}})
    events = [_choice(None)] * (request["max_tokens"] - 1) + [_choice("length")]
    data = b"".join(_chunk(b"data: %b\n\n" % json.dumps(event).encode()) for event in events)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + data + _chunk(b"data: [DONE]\n\n") + _chunk(b"")


def _whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
