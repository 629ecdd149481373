"""What a client may state of a beam search, and what becomes of it for the workers; over both APIs."""

from typing import Any

import grpc
import pytest

from common.values.request import EarlyStopping
from common.wire.pb import generation_pb2 as pb
from tests.router.front.grpc_rig import details_of, grpc_rig
from tests.router.front.http_rig import http_rig, ids
from tests.router.front.scripted_service import always

BEAMS: dict[str, Any] = {"prompt": "x", "use_beam_search": True, "n": 2}


async def test_the_choices_are_the_beams_or_the_best_of_more() -> None:
    service = always(ids("ok"))
    fields = {"best_of": 5, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0, "logprobs": 1}
    async with http_rig(service) as rig:
        for more in ({}, fields):
            reply = await rig.post("/v1/completions", {**BEAMS, **more})
            assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1], reply.text
    plain, best = service.submitted
    assert [(r.num_choices, r.sampling.num_beams, r.sampling.temperature) for r in (plain, best)] == [
        (2, 2, 0.0),
        (2, 5, 0.0),
    ]
    assert (plain.sampling.length_penalty, plain.sampling.early_stopping) == (1.0, EarlyStopping.FALSE)
    assert (best.sampling.length_penalty, best.sampling.early_stopping) == (0.5, EarlyStopping.NEVER)
    assert (best.num_best, best.sampling.num_logprobs, plain.sampling.num_logprobs) == (None, 1, None)
    # The tiny model has two tokens that end an answer.
    assert (best.sampling.num_candidates, best.sampling.num_logprobs_needed) == (15, 15)


async def test_a_grpc_call_states_the_same() -> None:
    service = always(ids("ok"))
    sampling = pb.SamplingParams(use_beam_search=True, best_of=3, length_penalty=-1.0, early_stopping="true")
    async with grpc_rig(service) as rig:
        await rig.generate(pb.GenerateRequest(prompt="x", sampling=sampling))
    [request] = service.submitted
    params = request.sampling
    assert (request.num_choices, params.num_beams, params.length_penalty) == (1, 3, -1.0)
    assert params.early_stopping is EarlyStopping.TRUE


async def test_what_models_advise_for_draws_does_not_shape_a_search() -> None:
    service = always(ids("ok"))
    async with http_rig(service) as rig:
        await rig.post("/v1/completions", {**BEAMS, "top_p": 1, "top_k": -1, "stop": [], "min_tokens": 0})
    [request] = service.submitted
    assert (request.sampling.top_p, request.sampling.top_k, request.sampling.has_penalties) == (1.0, 0, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"guided_regex": "a+"}, "use_beam_search"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 4}, "top_k"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"stop": "x"}, "stop"),
        ({"best_of": 1}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"stop_token_ids": list(range(10, 74)), "best_of": 8}, "use_beam_search"),
    ],
    ids=str,
)
async def test_what_does_not_go_with_a_search_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with http_rig(always(ids("ok"))) as rig:
        reply = await rig.post("/v1/completions", {**BEAMS, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_an_unknown_early_stopping_of_a_grpc_call_is_refused_by_name() -> None:
    async with grpc_rig(always(ids("ok"))) as rig:
        sampling = pb.SamplingParams(use_beam_search=True, early_stopping="soon")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(pb.GenerateRequest(prompt="x", sampling=sampling))
    assert details_of(refused.value)["BadRequest"].field_violations[0].field == "sampling.early_stopping"
