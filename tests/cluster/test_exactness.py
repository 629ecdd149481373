"""Disaggregated output equals one process: local prefill, preemption, refusals, a quantized cache, the Triton path."""

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from common.checkpoint import open_checkpoint
from common.engine.loading import load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong
from tests.common.engine import drive as driving
from tests.one_process import generate, generate_tokens
from tests.transformers_beams import beams

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


@pytest.fixture(scope="module")
def crowded(tiny_model: Path) -> Iterator[Cluster]:
    """Half a thousand tokens of KV on the decode worker, short queues, and short prompts prefilled there."""
    config = {
        "router": {"max_num_queued": 16},
        "prefill_worker": {"max_num_waiting": 2},
        "decode_worker": {"num_blocks": 32, "block_size": 16, "speculation": "ngram"},
    }
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "64")
    with running_cluster(tiny_model, *options, config=config) as cluster:
        yield cluster


async def test_prompts_prefilled_locally_and_shipped_ones_give_the_tokens_of_one_process(
    crowded: Cluster, tiny_model: Path
) -> None:
    cases = random_cases(20, seed=5)
    assert wrong(tiny_model, cases, await run_all(crowded.url, "tiny", cases, at_once=4)) == []
    records = crowded.get("/admin/v1/requests?limit=20")["requests"]
    assert {record["attempts"][-1]["is_local"] for record in records} == {True, False}


async def test_the_best_of_several_choices_are_those_of_one_process(crowded: Cluster, tiny_model: Path) -> None:
    case = random_cases(1, seed=11, max_tokens=12)[0]
    params = SamplingParams(seed=5, max_tokens=12, temperature=0.9, num_logprobs=0)
    choices = generate_tokens(tiny_model, case.token_ids, params, range(6))
    ranked = sorted(choices, key=lambda tokens: -mean(token.logprob or 0.0 for token in tokens))
    body = {**case.body("tiny"), "stream": False, "temperature": 0.9, "seed": 5, "n": 2, "best_of": 6}
    async with httpx.AsyncClient(timeout=120) as client:
        reply = (await client.post(f"{crowded.url}/v1/completions", json=body)).json()
    expected = [[token.token_id for token in tokens] for tokens in ranked[:2]]
    assert [choice["token_ids"] for choice in reply["choices"]] == expected
    assert reply["usage"]["completion_tokens"] == 6 * 12


async def test_beams_are_those_of_transformers_locally_and_shipped_over_both_apis(
    crowded: Cluster, tiny_model: Path
) -> None:
    prompts = [case.token_ids for case in random_cases(6, seed=12)]
    params = SamplingParams(seed=0, max_tokens=12, num_beams=4, length_penalty=0.5)
    async with httpx.AsyncClient(timeout=120) as client, grpc.aio.insecure_channel(crowded.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for number, prompt in enumerate(prompts):
            worker = {"prefill_worker_id": "prefill-0"} if number % 2 else {}
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.SamplingParams(use_beam_search=True, n=2, best_of=4, length_penalty=0.5),
                stop=pb.StopConditions(max_tokens=12, ignore_eos=True),
                routing=pb.RoutingHints(**worker),
            )
            answer = [list(event.chunk.token_ids) async for event in stub.Generate(request) if event.HasField("chunk")]
            assert answer == beams(tiny_model, prompt, params, 2)
        body = {"prompt": prompts, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        search = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
        reply = (await client.post(f"{crowded.url}/v1/completions", json={**body, **search})).json()
    found = [choice["token_ids"] for choice in reply["choices"]]
    assert found == [tokens for prompt in prompts for tokens in beams(tiny_model, prompt, params, 2)]
    records = crowded.get("/admin/v1/requests?limit=50")["requests"]
    searches = [record for record in records if record["num_beams"] == 4]
    assert len(searches) == 2 * len(prompts)
    assert {record["attempts"][-1]["is_local"] for record in searches} == {True, False}


async def test_bad_words_are_kept_out_as_in_one_process_over_both_apis(crowded: Cluster, tiny_model: Path) -> None:
    """The first bad word is the token that would have come first, the second a pair that would have come then."""
    tokenizer = open_checkpoint(tiny_model).tokenizer()
    cases = random_cases(30, seed=6, temperature=0.0, max_tokens=12)
    tried = [found for case in cases if (found := _bad_words(tiny_model, tokenizer, case)) is not None]
    assert len(tried) >= 4
    async with httpx.AsyncClient(timeout=120) as client, grpc.aio.insecure_channel(crowded.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for case, words, expected in tried:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=case.token_ids),
                sampling=pb.SamplingParams(temperature=0.0, bad_words=words),
                stop=pb.StopConditions(max_tokens=case.max_tokens, ignore_eos=True),
                routing=pb.RoutingHints(prefill_worker_id="prefill-0"),
            )
            answer = [token async for event in stub.Generate(request) for token in event.chunk.token_ids]
            assert answer == expected
            body = {**case.body("tiny"), "stream": False, "bad_words": words}
            reply = await client.post(f"{crowded.url}/v1/completions", json=body)
            assert reply.json()["choices"][0]["token_ids"] == expected
    records = crowded.get(f"/admin/v1/requests?limit={2 * len(tried)}")["requests"]
    assert {record["attempts"][-1]["is_local"] for record in records} == {True, False}


async def test_speculated_answers_are_those_of_one_process_and_drafts_are_counted(
    crowded: Cluster, tiny_model: Path
) -> None:
    """1. answers that repeat themselves, one after another; 2. drafts were accepted, and the record knows."""
    cases = random_cases(6, seed=12, max_tokens=90, regex="((one|two), three; ){8,}")
    assert wrong(tiny_model, cases, await run_all(crowded.url, "tiny", cases, at_once=1)) == []
    records = crowded.get(f"/admin/v1/requests?limit={len(cases)}")["requests"]
    num_accepted = sum(record["num_accepted_drafts"] for record in records)
    assert 0 < num_accepted <= sum(record["num_drafts"] for record in records)


GUIDED = r'\{"name": "[a-zA-Z ]{3,30}", "age": [1-9][0-9]?(, "tags": \[("[a-z]{1,8}"(, )?){1,6}\])?\}'


async def test_guided_outputs_match_and_are_those_of_one_process(crowded: Cluster, tiny_model: Path) -> None:
    """1. shipped and local, several choices, crowded until sequences are preempted; 2. each output matches whole."""
    cases = [
        *random_cases(10, seed=8, regex=GUIDED, max_tokens=90),
        *random_cases(4, seed=9, regex=GUIDED, max_tokens=90, num_choices=3, temperature=0.8),
        *random_cases(3, seed=10, regex="[0-9]{60}", max_tokens=90, temperature=0.0),
    ]
    found = await run_all(crowded.url, "tiny", cases)
    assert wrong(tiny_model, cases, found) == []
    tokenizer = open_checkpoint(tiny_model).tokenizer()
    for case in cases:
        for output in case.expected(tiny_model):
            assert len(output) == 90 or re.fullmatch(case.regex, tokenizer.decode(output)), output
    records = crowded.get(f"/admin/v1/requests?limit={len(cases)}")["requests"]
    assert {record["attempts"][-1]["is_local"] for record in records} == {True, False}


def _bad_words(path: Path, tokenizer: Tokenizer, case: Case) -> tuple[Case, list[str], list[int]] | None:
    """Bad words of a case, and the output without them; None: its tokens are no text of their own."""
    params = SamplingParams(seed=case.seed, max_tokens=case.max_tokens, temperature=0.0)
    first = (case.expected(path)[0][0],)
    (without_first,) = generate(path, case.token_ids, dataclasses.replace(params, bad_words=(first,)))
    pair = tuple(without_first[2:4])
    (output,) = generate(path, case.token_ids, dataclasses.replace(params, bad_words=(first, pair)))
    assert output[0] != first[0] and output[2:4] != list(pair)
    texts = [tokenizer.decode(list(ids)) for ids in (first, pair)]
    is_spelled = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts] == [first, pair]
    return (case, texts, output) if is_spelled and all(text.strip() for text in texts) else None


async def test_a_pool_too_small_for_the_load_preempts_and_stays_exact(crowded: Cluster, tiny_model: Path) -> None:
    """1. 32 blocks, 16 requests that grow to 15 blocks each; 2. preemptions happened; 3. every token is right."""
    cases = random_cases(16, seed=4, max_tokens=60)
    assert wrong(tiny_model, cases, await run_all(crowded.url, "tiny", cases)) == []
    assert crowded.workers("decode")[0]["num_preemptions"] > 0


async def test_more_than_the_queue_holds_is_refused_with_a_hint_and_the_rest_is_right(
    crowded: Cluster, tiny_model: Path
) -> None:
    """1. queue of 16, room for some five sequences; 2. 60 requests at once; 3. each is exact, or 503 with
    Retry-After."""
    cases = random_cases(60, seed=23, max_tokens=60)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        bodies = [{**case.body("tiny"), "stream": False} for case in cases]
        replies = await asyncio.gather(*(client.post(f"{crowded.url}/v1/completions", json=body) for body in bodies))
    refused = [reply for reply in replies if reply.status_code == 503]
    assert refused, "nothing was refused"
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert {reply.json()["error"]["type"] for reply in refused} == {"server_overloaded"}
    accepted = [(case, reply) for case, reply in zip(cases, replies, strict=True) if reply.status_code == 200]
    assert len(accepted) + len(refused) == len(cases) and accepted
    for case, reply in accepted:
        assert reply.json()["choices"][0]["token_ids"] == case.expected(tiny_model)[0]


async def test_a_quantized_cache_gives_the_tokens_of_one_process_that_has_it(tiny_model: Path) -> None:
    """Blocks of different sizes on both sides; what one process says is asked of its runner, not of the oracle."""
    config = {"prefill_worker": {"block_size": 16}, "decode_worker": {"block_size": 32}}
    cases = random_cases(16, seed=7, temperature=0.0)
    expected = _outputs_of_one_process(tiny_model, cases)
    with running_cluster(tiny_model, *DISAGGREGATED, "--kv-cache-dtype", "int8", config=config) as cluster:
        answers = await run_all(cluster.url, "tiny", cases)
    assert [answer[0].token_ids for answer in answers] == expected
    assert expected != [case.expected(tiny_model)[0] for case in cases]  # the cache was quantized indeed


def _outputs_of_one_process(path: Path, cases: list[Case]) -> list[list[int]]:
    model = ModelConfig(path=str(path))
    options = {"dtype": "float32", "attention": "cpu", "num_blocks": 300, "kv_cache_dtype": "int8"}
    loaded = load_model(WorkerConfig(role="decode", worker_id="d", model=model, **options))
    capacity = [len(case.token_ids) + case.max_tokens for case in cases]
    tables = driving.blocks_for(capacity, 16, 300)
    batch = [
        driving.Generation(
            list(case.token_ids),
            SamplingParams(seed=case.seed, max_tokens=case.max_tokens, temperature=0.0),
            table,
        )
        for case, table in zip(cases, tables, strict=True)
    ]
    driving.run_all(loaded.runner, batch, 512)
    return [generation.output for generation in batch]


async def test_the_triton_path_gives_the_tokens_of_the_cpu_path(tiny_model: Path) -> None:
    """The kernels of a GPU under the interpreter, in the whole service."""
    cases = random_cases(4, seed=6, max_tokens=6)
    options = (*DISAGGREGATED, "--attention", "triton")
    with running_cluster(tiny_model, *options) as cluster:
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases, at_once=4)) == []
