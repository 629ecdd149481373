"""Models with other KV than keys and values of all tokens, in clusters that ship it: the tokens of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.cluster import running_cluster
from tests.common.engine.test_windows import MODEL, NUM_TOKENS, continuations
from tests.tiny_model import FAMILIES, TinyModel, write_tiny_model

PROMPTS = tuple([(seed + 7 * idx) % 250 + 3 for idx in range(length)] for seed, length in enumerate((4, 37, 90, 150)))


@pytest.mark.parametrize("model", [MODEL, FAMILIES["deepseek_v3"]], ids=["windows", "latents"])
async def test_a_disaggregated_model_gives_the_tokens_of_transformers(tmp_path: Path, model: TinyModel) -> None:
    """1. Chunks of 7, blocks of 16 and 8: each prompt alone, then again.  2. All at once on a decode worker that has
    too few blocks for them.
    """
    path = write_tiny_model(tmp_path / "tiny", model)
    expected = continuations(path, PROMPTS)
    config = {
        "prefill_worker": {"block_size": 16, "max_num_batched_tokens": 7},
        "decode_worker": {"block_size": 8, "num_blocks": 48},
    }
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
    with running_cluster(path, *options, config=config) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=280) as client:
            cold = [await _complete(client, prompt) for prompt in PROMPTS]
            warm = [await _complete(client, prompt) for prompt in PROMPTS]
            together = await asyncio.gather(*(_complete(client, prompt) for prompt in PROMPTS))
        bytes_of_cold, bytes_of_warm = (answers[-1]["metrics"]["kv_bytes"] for answers in (cold, warm))
        assert bytes_of_warm < bytes_of_cold  # of its blocks those were found that others had not taken
        for answers in (cold, warm, together):
            assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        cluster.audit()


async def _complete(client: httpx.AsyncClient, prompt: list[int]) -> Any:
    fields = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_timings": True,
    }
    reply = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()
