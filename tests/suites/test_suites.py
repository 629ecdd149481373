"""What outside suites depend on, held without them; and that one that cannot be used costs its own rows."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.front.http_rig import http_rig, ids
from tests.router.front.test_prompt_logprobs import scoring
from tests.suites import run
from tests.suites.environments import COMPAT_CANARY, PINS, hash_of
from tests.suites.row import Row, table


def loglikelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """As lm-eval 0.4 reads an answer: the tokens after the context, without the one that was generated."""
    logprobs = choice["logprobs"]
    own = logprobs["token_logprobs"][num_context:-1]
    tops = logprobs["top_logprobs"][num_context:-1]
    return sum(own), all(logprob == max(top.values()) for logprob, top in zip(own, tops, strict=True))


async def test_the_request_of_lm_eval_is_answered_in_the_form_that_it_reads() -> None:
    contexts, continuations = ["The quick", "A"], [" fox", " b c"]
    prompts = [ids(context + continuation) for context, continuation in zip(contexts, continuations, strict=True)]
    body = {
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    async with http_rig(scoring()) as rig:
        reply = await rig.post("/v1/completions", {"model": "tiny", **body})
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    for choice, context, prompt in zip(choices, contexts, prompts, strict=True):
        num_context = len(ids(context))
        expected = sum(-position / 8 for position in range(num_context, len(prompt)))
        assert loglikelihood(choice, num_context) == (expected, False)


def test_a_suite_that_cannot_be_used_costs_its_own_rows() -> None:
    def broken(url: str, model: str, directory: Path) -> Iterator[Row]:
        yield Row("some suite", "one", "passes")
        raise subprocess.CalledProcessError(1, ["pip"], stderr=b"no matching distribution")

    first, last = run.spared("broken", broken, "http://x/v1", Path())
    assert (first.outcome, last.outcome, last.suite) == ("passes", "not run", "broken")
    assert "no matching distribution" in last.note


def test_versions_are_pinned() -> None:
    for package in (pin for pins in PINS.values() for pin in pins):
        name, _, version = package.partition("==")
        assert name and version[:1].isdigit(), package
    assert COMPAT_CANARY.partition("@")[2][:1].isdigit()


def test_an_environment_is_made_anew_when_any_of_its_pins_changes() -> None:
    for pins in PINS.values():
        for idx, pin in enumerate(pins):
            assert hash_of((*pins[:idx], f"{pin}.1", *pins[idx + 1 :])) != hash_of(pins)
            assert hash_of((*pins[:idx], f"other{pin}", *pins[idx + 1 :])) != hash_of(pins)


def test_a_table_has_a_line_for_each_row_and_counts_them() -> None:
    text = table(
        [
            Row("s", "a", "passes"),
            Row("s", "b", "fails", "x | y\nz"),
            Row("t", "c", "skipped"),
        ]
    )
    assert "## s: 1 of 2" in text and "## t: 0 of 1" in text
    assert "| a | passes |" in text and "| b | fails: x / y z |" in text


@pytest.mark.parametrize("name", run.SUITES)
def test_what_a_suite_needs_is_there(name: str) -> None:
    data = Path(run.__file__).with_name("data") / "facts.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert all(0 <= row["answer"] < len(row["choices"]) for row in rows)
    assert name in (*PINS, "canary")
