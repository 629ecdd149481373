"""Requests to a cluster and what must come back: streams over HTTP, checked token for token against one process."""

import asyncio
import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from common.checkpoint import open_checkpoint
from common.guided.grammar import of_regex
from common.values.request import SamplingParams
from tests.one_process import generate

VOCAB = range(3, 250)  # plain byte tokens of the tiny model


@dataclass(slots=True)
class Streamed:
    """One choice as its client saw it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    calls: list[list[str]] = field(default_factory=list)  # name and arguments


class Asked(Protocol):
    """A request and what one process gives for it."""

    @property
    def path(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def num_choices(self) -> int: ...

    def body(self, model: str) -> dict[str, Any]: ...

    def expected(self, model_path: Path) -> list[list[int]]: ...

    def reason(self, expected: list[int]) -> str:
        """With which an answer of these tokens ends."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A request by token ids, and its parameters."""

    token_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    max_tokens: int = 24
    num_choices: int = 1
    regex: str = ""  # that the output must match; it then ends by itself

    path = "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.num_choices,
            "stream": True,
            "return_token_ids": True,
            **({"guided_regex": self.regex} if self.regex else {"ignore_eos": True}),
        }

    def expected(self, model_path: Path) -> list[list[int]]:
        """The oracle: one process, no paging, no batching, no handoff. Slow, and asked once per case."""
        return _expected(self, model_path)

    def reason(self, expected: list[int]) -> str:
        return "stop" if self.regex and len(expected) < self.max_tokens else "length"


@functools.cache
def _expected(case: Case, model_path: Path) -> list[list[int]]:
    params = SamplingParams(seed=case.seed, max_tokens=case.max_tokens, temperature=case.temperature)
    if case.regex:
        stop_token_ids = open_checkpoint(model_path).eos_token_ids
        params = dataclasses.replace(params, grammar=of_regex(case.regex), stop_token_ids=stop_token_ids)
    return generate(model_path, case.token_ids, params, choices=tuple(range(case.num_choices)))


def random_cases(count: int, seed: int, **fixed: Any) -> list[Case]:
    """Prompts of 1 to 200 tokens."""
    rng = random.Random(seed)
    return [
        Case(tuple(rng.choices(VOCAB, k=rng.randint(1, 200))), seed=rng.randrange(1 << 40), **fixed)
        for _ in range(count)
    ]


async def stream(client: httpx.AsyncClient, url: str, model: str, case: Asked) -> list[Streamed]:
    """Run one case; raises on any status but 200 and on an error inside the stream."""
    choices = [Streamed() for _ in range(case.num_choices)]
    done = False
    async with client.stream("POST", f"{url}{case.path}", json=case.body(model)) as reply:
        if reply.status_code != 200:
            raise AssertionError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                _apply(choices, json.loads(line.removeprefix("data: ")))
    assert done, "the stream ended without [DONE]"
    return choices


def _apply(choices: list[Streamed], chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for part in chunk["choices"]:
        choice = choices[part["index"]]
        assert choice.finish_reason is None, "tokens after the end"
        choice.token_ids += part.get("token_ids") or []
        choice.finish_reason = part["finish_reason"]
        for call in part.get("delta", {}).get("tool_calls", ()):
            if call["index"] == len(choice.calls):
                choice.calls.append([call["function"]["name"], ""])
            choice.calls[call["index"]][1] += call["function"]["arguments"]


async def run_all(url: str, model: str, cases: Sequence[Asked], at_once: int = 16) -> list[list[Streamed]]:
    """All cases, at most `at_once` at a time."""
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=at_once)) as client:

        async def one(case: Asked) -> list[Streamed]:
            async with slots:
                return await stream(client, url, model, case)

        return list(await asyncio.gather(*(one(case) for case in cases)))


def wrong(model_path: Path, cases: Sequence[Asked], answers: list[list[Streamed]]) -> list[str]:
    """Every choice that is not exactly the oracle's."""
    faults = []
    for case, answer in zip(cases, answers, strict=True):
        for idx, (choice, expected) in enumerate(zip(answer, case.expected(model_path), strict=True)):
            if choice.token_ids != expected or choice.finish_reason != case.reason(expected):
                faults.append(f"seed {case.seed} choice {idx}: {choice} expected {expected}")
    return faults
