"""Chats whose answer must be calls, with what one process gives for them."""

import asyncio
import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint import open_checkpoint
from common.values.request import SamplingParams
from router.request.constraint import Grammars
from router.request.dialect import Dialect
from router.request.expected import format_of, guide_of
from router.request.spec import ChatPrompt, RequestSpec
from router.text.calls.tools import Tool, ToolUse
from router.text.chat_template import chat_message
from router.text.tokenizer import PromptTokenizer
from tests.cluster.load import Streamed
from tests.one_process import generate

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", "of a city", SCHEMA), Tool("place", None, SCHEMA))


@dataclass(frozen=True, slots=True)
class ToolCase:
    """One call at least of TOOLS; `is_single`: exactly one."""

    question: str
    seed: int
    temperature: float = 1.0
    max_tokens: int = 200
    num_choices: int = 1
    is_single: bool = True

    path = "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.question}],
            "tools": [tool.for_template for tool in TOOLS],
            "tool_choice": "required",
            "parallel_tool_calls": not self.is_single,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.num_choices,
            "stream": True,
            "return_token_ids": True,
        }

    def expected(self, model_path: Path) -> list[list[int]]:
        return _expected(self, model_path)

    def reason(self, expected: list[int]) -> str:
        return "tool_calls" if len(expected) < self.max_tokens else "length"


@functools.cache
def _expected(case: ToolCase, model_path: Path) -> list[list[int]]:
    """The oracle, with the prompt and the grammar that a router makes of the request."""
    checkpoint = open_checkpoint(model_path)
    tokenizer, dialect = PromptTokenizer.of(checkpoint), Dialect.of(checkpoint.chat_template)
    prompt = ChatPrompt((chat_message("user", case.question, None),), tools=tuple(tool.for_template for tool in TOOLS))
    spec = RequestSpec(prompt, tools=ToolUse(TOOLS, "required", is_single=case.is_single))
    guide = guide_of(spec, dialect, format_of(spec, dialect, ""))
    grammars = Grammars(tokenizer.tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids)
    params = SamplingParams(
        seed=case.seed,
        max_tokens=case.max_tokens,
        temperature=case.temperature,
        grammar=asyncio.run(grammars.grammar_of(guide)),
        stop_token_ids=checkpoint.eos_token_ids,
    )
    token_ids = tuple(tokenizer.encode_chat(prompt.messages, tools=prompt.tools))
    return generate(model_path, token_ids, params, choices=tuple(range(case.num_choices)))


def tool_cases(count: int, seed: int, **fixed: Any) -> list[ToolCase]:
    """Questions of some words."""
    rng = random.Random(seed)
    words = ("how", "warm", "is", "it", "in", "the", "north", "of", "Rome", "and", "Oslo", "today", "or", "on", "hills")
    return [
        ToolCase(" ".join(rng.choices(words, k=rng.randint(1, 40))), rng.randrange(1 << 40), **fixed)
        for _ in range(count)
    ]


def check_calls(answers: list[list[Streamed]]) -> int:
    """Every complete answer's calls have the functions' own arguments; returns how many calls there were."""
    num_calls = 0
    for choice in (choice for answer in answers for choice in answer if choice.finish_reason == "tool_calls"):
        assert choice.calls
        for name, arguments in choice.calls:
            assert name in {tool.name for tool in TOOLS}
            assert set(json.loads(arguments)) == set(SCHEMA["required"])
            num_calls += 1
    return num_calls
