"""The real core, scheduler and runner search beams as transformers does, token for token, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine.contract.executor import StepFinished
from common.engine.contract.plan import SequenceResult, StepResult
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel
from common.engine.scheduling.block_tables import PoolGroup
from common.values.ids import TransferId
from common.values.messages import AttemptFailed, Refused
from common.values.request import EarlyStopping, FinishReason, SampledToken, SamplingParams, Work
from decode_worker.beam_search import Beam, BeamSearch
from kvtransfer.events import FinishAnnounced, FirstToken
from tests.common.engine.served import Served
from tests.decode_worker.harness import PREFILL, Bench, job
from tests.decode_worker.tiny_loaded import load_tiny
from tests.tiny_model import FAMILIES, write_tiny_model
from tests.transformers_beams import beams

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PROMPTS = [(5, 77, 130, 9), (41,) * 16, tuple(range(10, 47)), (7, 8, 9, 10, 7, 8, 9)]
# Many tokens end a beam, so that some end early.
PARAMS = SamplingParams(seed=1, max_tokens=14, temperature=0.0, num_beams=4, stop_token_ids=tuple(range(3, 60, 4)))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_tiny(model_path, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def new_bench(num_blocks: int = NUM_BLOCKS, max_num_seqs: int = 64, max_draft_tokens: int = 0) -> Bench:
    groups = [PoolGroup(BlockPool(num_blocks, BLOCK_SIZE))]
    sizes = {"max_num_seqs": max_num_seqs, "max_num_waiting": 64, "max_draft_tokens": max_draft_tokens}
    return Bench(groups=groups, **sizes)


def run(bench: Bench, loaded: LoadedModel) -> None:
    while bench.plan is not None:
        plan, bench.plan = bench.plan, None
        bench.handle(StepFinished(replace(loaded.runner.run(plan), duration_s=0.01)))


def searched(
    loaded: LoadedModel, params: SamplingParams, num_returned: int, **sizes: int
) -> tuple[Bench, list[list[list[int]]]]:
    """The winners of each prompt, searched in one batch as far as there are blocks."""
    bench = new_bench(**sizes)
    choices = tuple(range(num_returned))
    for number, prompt in enumerate(PROMPTS):
        work = job(f"r{number}", prompt, sampling=params, choices=choices)
        bench.reserve(work, local=1000)
        if isinstance(bench.sent[-1], Refused):
            run(bench, loaded)
            bench.reserve(work, local=1000)
    run(bench, loaded)
    return bench, [[bench.output(f"r{number}", choice) for choice in choices] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_winners_are_those_of_transformers(
    loaded: LoadedModel, model_path: Path, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    params = replace(PARAMS, length_penalty=length_penalty, early_stopping=early_stopping)
    bench, winners = searched(loaded, params, 3)
    assert winners == [beams(model_path, prompt, params, 3) for prompt in PROMPTS]
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("num_beams", [1, 2, 8])
def test_any_width_and_no_end_but_the_length(loaded: LoadedModel, model_path: Path, num_beams: int) -> None:
    params = replace(PARAMS, num_beams=num_beams, stop_token_ids=())
    _, winners = searched(loaded, params, num_beams)
    if num_beams > 1:  # one beam is greedy there, and here
        assert winners == [beams(model_path, prompt, params, num_beams) for prompt in PROMPTS]
    assert {len(tokens) for found in winners for tokens in found} == {params.max_tokens}


def test_the_length_penalty_and_the_ends_matter_in_these_searches(loaded: LoadedModel) -> None:
    """Else the comparisons above would compare little."""
    kinds = [replace(PARAMS, length_penalty=penalty) for penalty in (-1.0, 2.0)]
    found = [searched(loaded, params, 3)[1] for params in kinds]
    assert found[0] != found[1]
    lengths = [{len(tokens) for winners in each for tokens in winners} for each in found]
    assert len(lengths[0]) > 2
    assert lengths[1] == {PARAMS.max_tokens}


@pytest.mark.parametrize(
    "sizes", [{"num_blocks": 14}, {"max_num_seqs": 3}, {"num_blocks": 16, "max_num_seqs": 2}], ids=str
)
def test_preempted_and_waiting_beams_win_the_same(loaded: LoadedModel, model_path: Path, sizes: dict[str, int]) -> None:
    """Few blocks, and a batch that holds fewer sequences than a search has beams."""
    bench, winners = searched(loaded, PARAMS, 2, **sizes)
    assert winners == [beams(model_path, prompt, PARAMS, 2) for prompt in PROMPTS]
    assert bench.role.state.scheduler.num_preemptions > 0 or "num_blocks" not in sizes
    assert bench.counts() == (0, 0)


def scripted(bench: Bench) -> None:
    """One step; of any sequence the candidates follow from its last token."""
    assert bench.plan is not None
    plan, bench.plan = bench.plan, None
    rows = [
        SequenceResult(each.sequence_id, ((candidates(each.token_ids[-1]),),))
        for each in plan.sequences
        if each.samples
    ]
    bench.handle(StepFinished(StepResult(plan.step_id, tuple(rows), 0.01)))


def candidates(token_id: int) -> SampledToken:
    top = tuple((4 + (7 * token_id + 3 * number) % 40, -0.1 - 0.3 * number) for number in range(8))
    return SampledToken(*top[0], top)


def search(name: str, num_prompt_tokens: int, max_tokens: int, num_beams: int, tenant: str = "") -> Work:
    params = replace(PARAMS, max_tokens=max_tokens, num_beams=num_beams, stop_token_ids=(3,))
    first = 30 * int(name)
    return job(name, tuple(range(first, first + num_prompt_tokens)), sampling=params, tenant=tenant)


@pytest.mark.parametrize(
    ("num_blocks", "works"),
    [
        (6, [search("0", 10, 11, 2, "a"), search("1", 8, 7, 2, "b")]),
        (7, [search("0", 7, 10, 3, "a"), search("1", 9, 16, 2, "b")]),
        (8, [search("0", 11, 16, 3, "a"), search("1", 4, 12, 2, "b")]),
    ],
)
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_no_search_waits_for_blocks_that_another_keeps_for_it(
    num_blocks: int, works: list[Work], max_num_seqs: int
) -> None:
    """Too few for both, whose tenants take turns."""
    bench = Bench(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
    for work in works:
        bench.reserve(work, local=1000)
    while bench.plan is not None:
        scripted(bench)
    for work in works:
        assert bench.finish_reason(work.attempt_id.request_id) is FinishReason.LENGTH
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("num_steps", range(0, 16, 3))
def test_a_search_that_comes_while_another_is_short_of_blocks_stops_neither(num_steps: int) -> None:
    """What is reserved is not preempted: the one that was first gives up its own blocks instead."""
    bench = Bench(num_blocks=6, block_size=BLOCK_SIZE)
    works = [search("0", 8, 16, 3), search("1", 10, 8, 3)]
    bench.reserve(works[0], local=1000)
    bench.reserve(works[1])
    for _ in range(num_steps):
        if bench.plan is not None:
            scripted(bench)
    first = FirstToken(0, candidates(5))
    bench.handle(FinishAnnounced(PREFILL, TransferId(works[1].attempt_id, 0), 4, (first,)))
    while bench.plan is not None:
        scripted(bench)
    for work in works:
        assert bench.finish_reason(work.attempt_id.request_id) is FinishReason.LENGTH
    assert bench.counts() == (0, 0)


def test_beams_beside_sampled_choices_change_nothing_of_either(loaded: LoadedModel, model_path: Path) -> None:
    sampled = SamplingParams(seed=3, max_tokens=14)
    alone = new_bench()
    alone.reserve(job("s", PROMPTS[0], sampling=sampled, choices=(0, 1)), local=1000)
    run(alone, loaded)
    bench = new_bench(max_draft_tokens=5)
    bench.reserve(job("b", PROMPTS[1], sampling=PARAMS, choices=(0, 1)), local=1000)
    bench.reserve(job("s", PROMPTS[0], sampling=sampled, choices=(0, 1)), local=1000)
    run(bench, loaded)
    assert [bench.output("b", choice) for choice in (0, 1)] == beams(model_path, PROMPTS[1], PARAMS, 2)
    assert [bench.output("s", choice) for choice in (0, 1)] == [alone.output("s", choice) for choice in (0, 1)]


def test_winners_end_as_their_last_token_says_and_have_the_logprobs_that_are_asked_for(loaded: LoadedModel) -> None:
    bench, _ = searched(loaded, replace(PARAMS, num_logprobs=2), 2)
    events = [event for number in range(len(PROMPTS)) for event in bench.events(f"r{number}")]
    assert all(event.token.logprob is not None and len(event.token.top) == 2 for event in events)
    ends = [event for event in events if event.finish_reason is not None]
    assert len(ends) == 2 * len(PROMPTS)
    for end in ends:
        is_stop = end.token.token_id in PARAMS.stop_token_ids
        assert end.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_a_search_keeps_no_more_of_its_candidates_than_the_client_is_told(num_logprobs: int | None) -> None:
    """Their number grows with the client's own stop tokens, and a beam is as long as the context."""
    stops = tuple(range(1000, 1064))
    search = BeamSearch(replace(PARAMS, max_tokens=100, stop_token_ids=stops, num_logprobs=num_logprobs))
    row = [(token_id, -float(token_id)) for token_id in range(search._params.num_candidates)]
    steps = search.advance([row])
    for _ in range(20):
        steps = search.advance([row for _ in steps])
    beam: Beam | None = search._running[0]
    while beam is not None:
        assert len(beam.row) == (num_logprobs or 0 if beam.num_tokens else 0)
        beam = beam.parent


def test_nothing_is_told_before_the_search_ends_and_a_cancel_frees_all_beams(loaded: LoadedModel) -> None:
    bench = new_bench()
    bench.reserve(job("r", PROMPTS[0], sampling=replace(PARAMS, stop_token_ids=()), choices=(0, 1)), local=1000)
    for _ in range(5):
        plan, bench.plan = bench.plan, None
        assert plan is not None
        bench.handle(StepFinished(replace(loaded.runner.run(plan), duration_s=0.01)))
    assert list(bench.events("r")) == []
    bench.cancel("r")
    run(bench, loaded)
    assert list(bench.events("r")) == []
    assert bench.counts() == (0, 0)


def test_first_tokens_that_lack_candidates_fail_the_attempt() -> None:
    """As those of a prefill worker that does not know of beams."""
    bench = new_bench()
    work = job("r", PROMPTS[0], sampling=PARAMS)
    bench.start(work)
    [failed] = [message for message in bench.messages("r") if isinstance(message, AttemptFailed)]
    assert (failed.reason, failed.is_retryable) == ("first tokens only of choices [0], or too few candidates: 0", True)
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v2"])
def test_beams_share_blocks_of_windows_and_of_latents_too(tmp_path: Path, family: str) -> None:
    """Whatever no sequence refers to is NaN, so that nothing is read which a fork has not."""
    path = write_tiny_model(tmp_path / "m", FAMILIES[family])
    options: dict[str, Any] = {"dtype": "float32", "attention": "cpu", "num_threads": 1}
    options |= {"block_size": BLOCK_SIZE, "num_blocks": 120}
    bench = Served(path, fills_unused=True, **options)
    for number, prompt in enumerate(PROMPTS[:2]):
        bench.reserve(job(f"r{number}", prompt, sampling=PARAMS, choices=(0, 1)), local=1000)
    bench.run_all()
    for number, prompt in enumerate(PROMPTS[:2]):
        assert [bench.output(f"r{number}", choice) for choice in (0, 1)] == beams(path, prompt, PARAMS, 2)
    assert bench.counts() == (0, 0)
