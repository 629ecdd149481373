"""The torch runner against the one-process oracle, and what a scheduler may rely on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.contract.plan import SampleSpec, ScheduledSequence, ScoreSpec, SequenceResult, StepPlan, draft_specs
from common.engine.executor.runner import build_batches
from common.engine.loading import LoadedModel, load_model
from common.engine.model.decoder import Decoder
from common.values.config import ModelConfig, WorkerConfig
from common.values.ids import AttemptId, RequestId
from common.values.request import SamplingParams, Work
from tests.caches import blocks_hold, fill, fill_block
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.interpreter import import_triton_interpreted
from tests.one_process import generate, generate_tokens
from tests.reference_model import load_reference
from tests.tiny_model import TinyModel, write_tiny_model

import_triton_interpreted()

PROMPTS = [[5, 77, 130, 9], [200], list(range(10, 47)), [41] * 16, list(range(100, 117))]
GREEDY = SamplingParams(seed=1, max_tokens=12, temperature=0.0)
SEEDED = SamplingParams(seed=11, max_tokens=12, temperature=1.0, num_logprobs=2)
PENALIZED = SamplingParams(seed=2, max_tokens=12, temperature=0.0, presence_penalty=1.5, repetition_penalty=1.3)
BLOCK_SIZE = 8


def load(path: Path, **fields: Any) -> LoadedModel:
    options = {"dtype": "float32", "attention": "cpu", "block_size": BLOCK_SIZE, "num_blocks": 64, "num_threads": 1}
    return load_model(
        WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), **(options | fields))
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def loaded(model_path: Path) -> LoadedModel:
    return load(model_path)


def generations(params: SamplingParams) -> list[Generation]:
    tables = blocks_for([len(prompt) + params.max_tokens for prompt in PROMPTS], BLOCK_SIZE, 64)
    return [Generation(prompt, params, table) for prompt, table in zip(PROMPTS, tables, strict=True)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_batch_in_any_chunking_equals_one_process(
    loaded: LoadedModel, model_path: Path, params: SamplingParams, chunk: int
) -> None:
    batch = generations(params)
    run_all(loaded.runner, batch, chunk)
    for generation in batch:
        assert [generation.output] == generate(model_path, generation.prompt, params)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "olmo2"])
def test_other_architectures_equal_one_process(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    batch = generations(SEEDED)
    run_all(load(path).runner, batch, 7)
    for generation in batch:
        assert [generation.output] == generate(path, generation.prompt, SEEDED)


def test_the_triton_path_equals_one_process(model_path: Path) -> None:
    """Chunked prefill and mixed steps through the kernels, under Triton's interpreter where there is no GPU."""
    params = replace(SEEDED, max_tokens=4)
    batch = generations(params)[:3]
    run_all(load(model_path, attention="triton").runner, batch, 20)
    for generation in batch:
        assert [generation.output] == generate(model_path, generation.prompt, params)


def test_logprobs_equal_one_process(loaded: LoadedModel, model_path: Path) -> None:
    batch = generations(SEEDED)
    run_all(loaded.runner, batch, 64)
    for generation in batch:
        (expected,) = generate_tokens(model_path, generation.prompt, SEEDED)
        for ours, other in zip(generation.tokens, expected, strict=True):
            assert ours.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in other.top]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompts_logprobs_in_any_chunking_equal_one_process(
    loaded: LoadedModel, model_path: Path, chunk: int
) -> None:
    """Beside sequences that want none: chunks without a sample, and one that samples."""
    reference = load_reference(model_path)
    prompt, beside = PROMPTS[2], Generation(PROMPTS[4], GREEDY, (50, 51, 52, 53))
    expected = reference.forward(prompt, reference.new_past()).log_softmax(1)
    logprobs, tops, token = [], [], None
    for start in range(0, len(prompt), chunk):
        new = tuple(prompt[start : start + chunk])
        scores = ScoreSpec(start + 1, tuple(prompt[start + 1 : start + 1 + chunk]), 2)
        is_last = start + len(new) == len(prompt)
        sequence = ScheduledSequence(
            7,
            new,
            start,
            ((1, 2, 3, 4, 5),),
            (SampleSpec(0, 0, GREEDY),) if is_last else (),
            scores=scores if scores.token_ids else None,
        )
        others = [] if beside.has_ended else [beside.schedule(9, 3)]
        for result in loaded.runner.run(StepPlan(start, (*others, sequence))).results:
            if result.sequence_id == 9:
                beside.accept(result)
                continue
            token = result.tokens[0].token_id if result.runs else None
            if (found := result.prompt_logprobs) is not None:
                assert found.start == start + 1
                logprobs += found.logprobs
                tops += [found.top(position)[0][0] for position in range(found.start, found.end)]
    assert logprobs == pytest.approx(
        [expected[at, token_id].item() for at, token_id in enumerate(prompt[1:])], abs=1e-4
    )
    assert tops == expected[:-1].argmax(1).tolist()
    assert token == generate(model_path, prompt, GREEDY)[0][0]
    run_all(loaded.runner, [beside], 64)
    assert [beside.output] == generate(model_path, beside.prompt, GREEDY)


def test_a_prompt_that_cannot_be_scored_has_an_error_and_no_token(loaded: LoadedModel) -> None:
    fill_block(loaded.cache, 1, torch.nan)
    sample = (SampleSpec(0, 0, GREEDY),)
    sequences = (
        ScheduledSequence(1, (5, 6), 8, ((1, 2),), sample, scores=ScoreSpec(9, (6,), 0)),
        ScheduledSequence(2, (5, 6), 0, ((3,),), sample),
        ScheduledSequence(3, (5, 6), 8, ((1, 4),), scores=ScoreSpec(9, (6, 7), 0)),
    )
    damaged, healthy, unsampled = loaded.runner.run(StepPlan(0, sequences)).results
    assert damaged == SequenceResult(1, error="logits are not finite")
    assert healthy.error is None and healthy.runs and healthy.prompt_logprobs is None
    assert unsampled == SequenceResult(3, error="logits are not finite")


def test_several_samples_of_one_sequence_are_the_choices_first_tokens(loaded: LoadedModel, model_path: Path) -> None:
    choices = (0, 1, 2, 5)
    specs = tuple(SampleSpec(choice, 0, SEEDED) for choice in choices)
    sequences = (
        ScheduledSequence(1, tuple(PROMPTS[2]), 0, ((9, 3, 20, 1, 2),), specs),
        ScheduledSequence(2, tuple(PROMPTS[0]), 0, ((4,),), (SampleSpec(0, 0, GREEDY),)),
    )
    first, second = loaded.runner.run(StepPlan(0, sequences)).results
    expected = generate(model_path, PROMPTS[2], SEEDED, choices)
    assert [token.token_id for token in first.tokens] == [tokens[0] for tokens in expected]
    assert [[token.token_id for token in second.tokens]] == [generate(model_path, PROMPTS[0], GREEDY)[0][:1]]


def test_a_forked_sequence_goes_on_in_copied_blocks(loaded: LoadedModel, model_path: Path) -> None:
    """1. Prefill 12 tokens into blocks 10 and 11.  2. Copy block 11 to 30: choice 1 goes on in (10, 30), choice 0 in
    (10, 11).  3. Both equal one process, so neither wrote into the other's block.
    """
    prompt = PROMPTS[2][:12]
    specs = tuple(SampleSpec(choice, 0, SEEDED) for choice in (0, 1))
    (first,) = loaded.runner.run(StepPlan(0, (ScheduledSequence(1, tuple(prompt), 0, ((10, 11),), specs),))).results
    forks = [Generation(prompt, SEEDED, (10, block, 20 + block), choice) for choice, block in enumerate((11, 30))]
    for fork, token in zip(forks, first.tokens, strict=True):
        fork.tokens.append(token)
        fork.num_done = len(prompt)
    copied = StepPlan(1, tuple(fork.schedule(idx, 1) for idx, fork in enumerate(forks)), block_copies=((0, 11, 30),))
    for fork, result in zip(forks, loaded.runner.run(copied).results, strict=True):
        fork.accept(result)
    run_all(loaded.runner, forks, 1)
    assert [fork.output for fork in forks] == generate(model_path, prompt, SEEDED, (0, 1))


def test_copies_alone_are_a_step(loaded: LoadedModel) -> None:
    fill_block(loaded.cache, 3, 5.0)
    result = loaded.runner.run(StepPlan(8, (), block_copies=((0, 3, 6),)))
    assert (result.step_id, result.results) == (8, ())
    assert blocks_hold(loaded.cache, [6], 5.0)


def test_only_sequences_with_samples_have_results_in_the_plans_order(loaded: LoadedModel) -> None:
    sample = (SampleSpec(0, 0, GREEDY),)
    sequences = (
        ScheduledSequence(7, (5, 6, 7), 0, ((1,),), sample),
        ScheduledSequence(3, (8, 9), 0, ((2,),)),
        ScheduledSequence(5, (10,), 0, ((3,),), sample),
    )
    result = loaded.runner.run(StepPlan(4, sequences))
    assert [found.sequence_id for found in result.results] == [7, 5]
    assert result.duration_s > 0


@pytest.mark.parametrize("has_samples", [True, False])
def test_the_layer_hook_is_called_once_per_layer_in_order(loaded: LoadedModel, has_samples: bool) -> None:
    seen: list[int] = []
    samples = (SampleSpec(0, 0, GREEDY),) if has_samples else ()
    loaded.runner.run(StepPlan(0, (ScheduledSequence(1, (5, 6, 7), 0, ((1,),), samples),)), seen.append)
    assert seen == [1, 2]


def test_a_sequence_with_damaged_kv_fails_alone(loaded: LoadedModel, model_path: Path) -> None:
    """NaN in one sequence's own cached KV is that sequence's error; its neighbour's tokens are right."""
    batch = generations(GREEDY)[:2]
    plan = StepPlan(0, tuple(generation.schedule(idx, 64) for idx, generation in enumerate(batch)))
    for result in loaded.runner.run(plan).results:
        batch[result.sequence_id].accept(result)
    fill_block(loaded.cache, batch[0].block_table[0], torch.nan)
    plan = StepPlan(1, tuple(generation.schedule(idx, 64) for idx, generation in enumerate(batch)))
    damaged, healthy = loaded.runner.run(plan).results
    assert damaged == SequenceResult(0, error="logits are not finite")
    batch[1].accept(healthy)
    assert batch[1].output == generate(model_path, batch[1].prompt, GREEDY)[0][:2]


def test_poisoned_free_blocks_do_not_matter(loaded: LoadedModel, model_path: Path) -> None:
    fill(loaded.cache, torch.nan)
    batch = generations(GREEDY)
    run_all(loaded.runner, batch, 16)
    assert [batch[2].output] == generate(model_path, PROMPTS[2], GREEDY)


def test_a_batch_says_where_every_token_stands() -> None:
    sequences = (
        ScheduledSequence(1, (5, 6, 7), 6, ((4, 2, 9),)),
        ScheduledSequence(2, (8,), 0, ((3,),)),
    )
    (batch,) = build_batches(sequences, 1, 8)
    assert batch.positions.tolist() == [6, 7, 8, 0]
    assert batch.slot_mapping.tolist() == [38, 39, 16, 24]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [9, 1]
    assert batch.block_tables.tolist() == [[4, 2], [3, 0]]
    assert (batch.max_query_len, batch.max_seq_len) == (3, 9)
    assert batch.slot_mapping.dtype == batch.positions.dtype == torch.int64
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32


def test_each_group_of_layers_has_slots_and_tables_of_its_own_and_shares_the_rest() -> None:
    """The second group's window has left its first block behind; there any number stands."""
    sequences = (ScheduledSequence(1, (5, 6), 9, ((4, 2), (0, 7))), ScheduledSequence(2, (8,), 0, ((3,), (1,))))
    full, windowed = build_batches(sequences, 2, 8)
    assert (full.slot_mapping.tolist(), windowed.slot_mapping.tolist()) == ([17, 18, 24], [57, 58, 8])
    assert (full.block_tables.tolist(), windowed.block_tables.tolist()) == ([[4, 2], [3, 0]], [[0, 7], [1, 0]])
    assert full.positions is windowed.positions
    assert full.seq_lens is windowed.seq_lens
    with pytest.raises(ValueError, match="sequence 3: 1 blocks, 2 needed"):
        build_batches((ScheduledSequence(3, (5, 6), 9, ((4, 2), (7,))),), 2, 8)


def test_far_blocks_have_64_bit_slots() -> None:
    (batch,) = build_batches((ScheduledSequence(1, (5,), 0, ((70_000_000,),)),), 1, 256)
    assert batch.slot_mapping.tolist() == [17_920_000_000]


def test_a_short_block_table_is_a_bug_that_names_the_sequence() -> None:
    with pytest.raises(ValueError, match="sequence 9: 1 blocks, 2 needed"):
        build_batches((ScheduledSequence(9, (5, 6), 7, ((4,),)),), 1, 8)


def test_layers_are_marked_before_anybody_hears_of_them(loaded: LoadedModel) -> None:
    """On a GPU a layer's kernels are only launched by then; a copy finds the mark that it must wait for."""
    log: list[object] = []

    class LoggingFence:
        def mark(self, num_layers: int) -> None:
            log.append(f"mark {num_layers}")

        def mark_step(self) -> None:
            log.append("mark step")

        def wait_for_layers(self, stream: object, num_layers: int) -> None: ...

        def wait_for_all(self, stream: object) -> None: ...

    loaded.cache.fence = LoggingFence()
    plan = StepPlan(0, (generations(GREEDY)[0].schedule(0, 4),))
    loaded.runner.run(plan, log.append)
    assert log == ["mark 1", 1, "mark 2", 2, "mark step"]
    loaded.runner.run(plan)
    assert log[5:] == ["mark 1", "mark 2", "mark step"]


@pytest.fixture
def answer(model_path: Path) -> dict[SamplingParams, list[int]]:
    return {params: generate(model_path, PROMPTS[0], params)[0] for params in (GREEDY, SEEDED, PENALIZED)}


def work_of(prompt: list[int], params: SamplingParams) -> Work:
    attempt_id = AttemptId(RequestId("a"), 0)
    return Work(attempt_id, tuple(prompt), len(prompt), params)


def wrong(token_id: int) -> int:
    return token_id % 200 + 3


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_output_is_the_same_with_drafts_and_each_right_one_saves_a_step(
    loaded: LoadedModel, answer: dict[SamplingParams, list[int]], params: SamplingParams, num_right: int
) -> None:
    """3 drafts in every step, of which the first `num_right` are right and the rest wrong; another sequence beside."""
    work = work_of(PROMPTS[0], params)
    table, other = (9, 3, 20), Generation(PROMPTS[2], replace(GREEDY, max_tokens=200), (30, 31, 32, 33, 34, 35, 36, 37))
    tokens, num_done, num_steps, logprobs = list(PROMPTS[0]), 0, 0, []
    while len(tokens) - len(PROMPTS[0]) < params.max_tokens:
        position = len(tokens) - len(PROMPTS[0])
        truth = (answer[params] + [5] * 4)[position : position + 3]
        drafts = tuple(t if idx < num_right else wrong(t) for idx, t in enumerate(truth))
        samples = draft_specs(work, 0, tokens, drafts)
        sequence = ScheduledSequence(1, tuple(tokens[num_done:]), num_done, (table,), samples, drafts)
        mine, beside = loaded.runner.run(StepPlan(num_steps, (sequence, other.schedule(2, 64)))).results
        other.accept(beside)
        (run,) = mine.runs
        assert len(run) == num_right + 1
        num_done = len(tokens)
        tokens += [token.token_id for token in run]
        logprobs += [token.logprob for token in run]
        num_done += len(run) - 1
        num_steps += 1
    assert tokens[len(PROMPTS[0]) :][: params.max_tokens] == answer[params]
    assert num_steps == -(-params.max_tokens // (num_right + 1))
    assert (logprobs[0] is None) == (params.num_logprobs is None)


def test_the_other_sequences_of_a_step_with_drafts_get_their_own_rows(
    loaded: LoadedModel, model_path: Path, answer: dict[SamplingParams, list[int]]
) -> None:
    """Before and behind: a chunk without samples, and two choices of one prompt from one row."""
    work, drafts = work_of(PROMPTS[0], SEEDED), tuple(answer[SEEDED][:2])
    choices = tuple(SampleSpec(choice, 0, SEEDED) for choice in (0, 1))
    sequences = (
        ScheduledSequence(1, (8, 9, 10), 0, ((2,),)),
        ScheduledSequence(2, tuple(PROMPTS[0]), 0, ((3, 4),), draft_specs(work, 0, PROMPTS[0], drafts), drafts),
        ScheduledSequence(3, tuple(PROMPTS[2]), 0, ((5, 6, 7, 8, 9),), choices),
    )
    drafted, forked = loaded.runner.run(StepPlan(0, sequences)).results
    assert [[token.token_id for token in run] for run in drafted.runs] == [answer[SEEDED][:3]]
    expected = [tokens[:1] for tokens in generate(model_path, PROMPTS[2], SEEDED, (0, 1))]
    assert [[token.token_id for token in run] for run in forked.runs] == expected


def test_a_bad_word_is_not_drawn_behind_the_draft_that_begins_it(
    loaded: LoadedModel, answer: dict[SamplingParams, list[int]]
) -> None:
    """The rows behind drafts know the drafts: what may not follow them is not drawn."""
    first, second = answer[GREEDY][:2]
    params = replace(GREEDY, bad_words=((first, second),))
    samples = draft_specs(work_of(PROMPTS[0], params), 0, PROMPTS[0], (first, second))
    sequence = ScheduledSequence(1, tuple(PROMPTS[0]), 0, ((3, 4),), samples, (first, second))
    (result,) = loaded.runner.run(StepPlan(0, (sequence,))).results
    (run,) = result.runs
    assert run[0].token_id == first
    assert len(run) == 2
    assert run[1].token_id != second


def test_an_error_behind_an_accepted_draft_leaves_what_was_drawn_before_it(
    loaded: LoadedModel, answer: dict[SamplingParams, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = tuple(answer[GREEDY][:2])
    samples = draft_specs(work_of(PROMPTS[0], GREEDY), 0, PROMPTS[0], drafts)
    plan = StepPlan(0, (ScheduledSequence(1, tuple(PROMPTS[0]), 0, ((3, 4),), samples, drafts),))
    forward = Decoder.forward

    def run_with_nan_in(row: int) -> SequenceResult:
        def spoiled(*arguments: Any) -> torch.Tensor:
            logits = forward(*arguments)
            logits[row] = torch.nan
            return logits

        monkeypatch.setattr(Decoder, "forward", spoiled)
        (result,) = loaded.runner.run(plan).results
        return result

    assert [[token.token_id for token in run] for run in run_with_nan_in(1).runs] == [answer[GREEDY][:1]]
    assert [[token.token_id for token in run] for run in run_with_nan_in(2).runs] == [answer[GREEDY][:2]]
    assert run_with_nan_in(0) == SequenceResult(1, error="logits are not finite")


def test_drafts_without_a_sample_for_each_are_a_bug() -> None:
    with pytest.raises(ValueError, match="1 samples for 2 drafts"):
        ScheduledSequence(1, (5,), 0, ((1,),), (SampleSpec(0, 0, GREEDY),), (6, 7))
