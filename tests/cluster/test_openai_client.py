"""The real model on two pairs: the reference's tokens over both APIs, and the `openai` package works unchanged."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.golden import load_goldens, mismatches_together, over_grpc, over_http, pools

GOLDENS = load_goldens()
CAPITAL = next(golden for golden in GOLDENS if golden.name == "capital")
CAPITAL_TEXT = "The capital of France is Paris."
# About 900 tokens, so that a repeat can reuse more than 800 of them.
LONG_TEXT = " ".join(f"Item {number} of the list is a thing worth naming." for number in range(75))


@pytest.fixture(scope="module")
def cluster(demo_model: Path) -> Iterator[Cluster]:
    """Every prompt is handed off, between blocks of different sizes and in small chunks."""
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
    with running_cluster(demo_model, *options, prefill=2, decode=2, config=pools(16, 32, 64)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


async def test_two_pairs_with_unequal_blocks_and_small_chunks(cluster: Cluster) -> None:
    """1. cold, all at once, HTTP; 2. warm, all at once, gRPC; chunk 64, blocks 16/32, 2P+2D."""
    assert await mismatches_together(GOLDENS, over_http, cluster.url) == []
    cluster.audit()
    assert await mismatches_together(GOLDENS, over_grpc, cluster.grpc) == []


def test_chat_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CAPITAL.messages, temperature=0, max_tokens=48)
    assert answer.choices[0].message.content == CAPITAL_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CAPITAL.prompt_token_ids)
    assert answer.usage.completion_tokens == len(CAPITAL.output_token_ids)


def test_streamed_chat_completion_with_usage(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=CAPITAL.messages,
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == CAPITAL_TEXT
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert chunks[-1].usage is not None and chunks[-1].choices == []


def test_completion_is_the_same_streamed_and_whole(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "seed": 7, "temperature": 0.8}
    whole = client.completions.create(**arguments)
    streamed = client.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_four_choices_share_one_prefill_and_differ(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": "The sea is", "max_tokens": 12, "seed": 3, "n": 4, "temperature": 1.0}
    first, again = client.completions.create(**arguments), client.completions.create(**arguments)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]
    assert first.usage is not None and first.usage.completion_tokens == 48


def test_a_shared_prefix_is_reported_and_the_request_lands_where_it_is(
    client: openai.OpenAI, model: str, cluster: Cluster
) -> None:
    """1. a long prompt, cold; 2. the router's copy of the index has it; 3. its prefix with another tail: 800 tokens
    cached, on the same prefill worker."""
    arguments = {"model": model, "max_tokens": 4, "temperature": 0}
    cold = client.completions.with_raw_response.create(prompt=f"{LONG_TEXT} First tail.", **arguments)
    name = "x-pdserve-prefill-worker"
    cluster.wait_for_index(cold.headers[name], 800 // 16)
    warm = client.completions.with_raw_response.create(prompt=f"{LONG_TEXT} Second tail.", **arguments)
    cold_usage, warm_usage = cold.parse().usage, warm.parse().usage
    assert cold_usage is not None and cold_usage.prompt_tokens_details is not None
    assert warm_usage is not None and warm_usage.prompt_tokens_details is not None
    assert cold_usage.prompt_tokens_details.cached_tokens == 0
    assert (warm_usage.prompt_tokens_details.cached_tokens or 0) >= 800
    assert cold.headers[name] == warm.headers[name]


def test_a_bad_field_is_a_bad_request(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="x", temperature=-1)
    assert refused.value.param == "temperature"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="nobody", prompt="x")
    assert refused.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=[5] * 9000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
