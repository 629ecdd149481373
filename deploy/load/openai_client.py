"""An endpoint of OpenAI's API as the bench uses it: its model, the tokens that it knows, one streamed answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from deploy.load.http_client import Endpoint, HttpFailed, events, fetch, stream
from deploy.load.plan import PlannedRequest
from deploy.load.prompts import WORDS, Prompts
from deploy.load.results import Outcome


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked, and how. `is_chat`: words as a message; else token ids or words as a prompt."""

    endpoint: Endpoint
    model: str
    is_chat: bool = False
    takes_token_ids: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0


async def served_model(endpoint: Endpoint) -> str:
    """The first model that the server names."""
    models = json.loads(await fetch(endpoint, "GET", "/v1/models"))["data"]
    if not models:
        raise HttpFailed("the server names no model: give --model")
    return str(models[0]["id"])


async def vocabulary_of(endpoint: Endpoint, model: str) -> list[int] | None:
    """Ordinary token ids that the server's own tokenizer gives, or None when it has no /tokenize."""
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    try:
        reply = json.loads(await fetch(endpoint, "POST", "/tokenize", json.dumps(body).encode()))
        token_ids = sorted({int(token_id) for token_id in reply["tokens"]})
    except (HttpFailed, ValueError, KeyError, TypeError):
        return None
    return token_ids or None


def body_of(target: Target, request: PlannedRequest, prompts: Prompts) -> bytes:
    """The request as it goes over the wire; made before its time has come."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.is_chat:
        body["messages"] = [{"role": "user", "content": prompts.text(request.pieces)}]
    elif target.takes_token_ids:
        body["prompt"] = prompts.token_ids(request.pieces)
    else:
        body["prompt"] = prompts.text(request.pieces)
    return json.dumps(body).encode()


async def ask(target: Target, body: bytes, outcome: Outcome) -> None:
    """Send and follow one request; everything that happens is in `outcome`. Raises nothing but cancellation."""
    outcome.sent_s = time.perf_counter()
    path = "/v1/chat/completions" if target.is_chat else "/v1/completions"
    try:
        async with asyncio.timeout(target.timeout_s):
            await _follow(events(stream(target.endpoint, "POST", path, body)), outcome)
    except TimeoutError:
        outcome.error = f"no end within {target.timeout_s:g} s"
    except (HttpFailed, ValueError, KeyError, TypeError) as error:
        outcome.error = str(error) or type(error).__name__
    outcome.ended_s = time.perf_counter()


async def _follow(data: AsyncIterator[bytes], outcome: Outcome) -> None:
    async for event in data:
        if event == b"[DONE]":
            break
        now_s = time.perf_counter()
        chunk = json.loads(event)
        if "error" in chunk:
            raise HttpFailed(str(chunk["error"].get("message", "error in the stream")))
        if chunk.get("choices"):
            outcome.event_s.append(now_s)
        if usage := chunk.get("usage"):
            outcome.num_input_tokens = int(usage["prompt_tokens"])
            outcome.num_output_tokens = int(usage["completion_tokens"])
    if not outcome.event_s:
        raise HttpFailed("the stream ended without a token")
    outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.event_s)
