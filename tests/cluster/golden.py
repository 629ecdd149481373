"""The golden prompts as requests over both public APIs, and the comparison with the reference."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx

from common.wire.pb import generation_pb2, generation_pb2_grpc
from tests.paths import GOLDEN_FILE

# A float32 forward pass agrees with the reference far better than this; the issue is agreement, not rounding.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt and what the reference implementation generated greedily."""

    name: str
    messages: list[dict[str, str]] | None
    prompt: str | None
    max_tokens: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Output:
    token_ids: list[int]
    logprobs: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


def load_goldens() -> list[Golden]:
    """All 24, shortest prompt first."""
    rows = json.loads(GOLDEN_FILE.read_text())
    goldens = [
        Golden(
            row["id"],
            row.get("messages"),
            row.get("prompt"),
            row["n"],
            row["prompt_token_ids"],
            row["output_token_ids"],
            row["logprobs"],
        )
        for row in rows
    ]
    return sorted(goldens, key=lambda golden: len(golden.prompt_token_ids))


def pools(prefill_block_size: int, decode_block_size: int, chunk: int) -> dict[str, Any]:
    """The configuration of a cluster; `chunk` is the token budget of a step."""
    return {
        "prefill_worker": {"block_size": prefill_block_size, "max_num_batched_tokens": chunk},
        "decode_worker": {"block_size": decode_block_size, "max_num_batched_tokens": chunk},
    }


def mismatch(golden: Golden, output: Output) -> str | None:
    """What differs, in one sentence; None when the output is the reference's."""
    if output.num_prompt_tokens != len(golden.prompt_token_ids):
        return f"{golden.name}: {output.num_prompt_tokens} prompt tokens, expected {len(golden.prompt_token_ids)}"
    if output.token_ids != golden.output_token_ids:
        return f"{golden.name}: got {output.token_ids}, expected {golden.output_token_ids}"
    worst = max(abs(ours - theirs) for ours, theirs in zip(output.logprobs, golden.logprobs, strict=True))
    return f"{golden.name}: logprobs differ by {worst}" if worst > LOGPROB_TOLERANCE else None


async def over_grpc(address: str, golden: Golden) -> Output:
    """Greedy generation through `GenerationService.Generate`, streaming."""
    request = generation_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stop=generation_pb2.StopConditions(max_tokens=golden.max_tokens),
        output=generation_pb2.OutputOptions(logprobs=0),
        stream=True,
    )
    if golden.messages is not None:
        messages = [generation_pb2.ChatMessage(**message) for message in golden.messages]
        request.chat.CopyFrom(generation_pb2.ChatInput(messages=messages, add_generation_prompt=True))
    else:
        request.prompt = golden.prompt or ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    usage = generation_pb2.Usage()
    async with grpc.aio.insecure_channel(address) as channel:
        async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=280):
            if response.HasField("chunk"):
                token_ids += response.chunk.token_ids
                logprobs += [entry.logprob for entry in response.chunk.logprobs]
            elif response.HasField("finished"):
                usage = response.finished.usage
    return Output(token_ids, logprobs, usage.prompt_tokens, usage.cached_tokens)


async def over_http(url: str, golden: Golden) -> Output:
    """Greedy generation through the completions API with the prompt's token ids, not streaming."""
    body: dict[str, Any] = {
        "model": (await _model_name(url)),
        "prompt": golden.prompt_token_ids,
        "max_tokens": golden.max_tokens,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(timeout=280) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    choice = reply["choices"][0]
    return Output(
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        reply["usage"]["prompt_tokens"],
        reply["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def mismatches_alone(goldens: Sequence[Golden], call: Any, target: str) -> list[str]:
    """One request at a time."""
    return [fault for golden in goldens if (fault := mismatch(golden, await call(target, golden)))]


async def mismatches_together(goldens: Sequence[Golden], call: Any, target: str) -> list[str]:
    """All requests at once."""
    outputs = await asyncio.gather(*(call(target, golden) for golden in goldens))
    return [fault for golden, output in zip(goldens, outputs, strict=True) if (fault := mismatch(golden, output))]


async def _model_name(url: str) -> str:
    async with httpx.AsyncClient(timeout=60) as client:
        models = (await client.get(f"{url}/v1/models")).json()
    return str(models["data"][0]["id"])
