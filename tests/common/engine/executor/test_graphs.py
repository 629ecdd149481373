"""Replayed decode steps equal launched ones. The capture is a stand-in that runs the step again on the same tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.contract.plan import ScheduledSequence, StepPlan
from common.engine.executor.graphs import DecodeGraphs
from common.engine.executor.runner import ModelRunner, build_batches
from common.engine.loading import LoadedModel, load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.caches import blocks_hold, fill
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.interpreter import import_triton_interpreted
from tests.tiny_model import TinyModel, write_tiny_model

import_triton_interpreted()

from common.engine.devices.triton.device import TritonDevice  # noqa: E402  (triton, interpreted)

PROMPTS = [[5, 77, 130, 9], [200], list(range(10, 47)), [41] * 16, list(range(100, 117))]
NUM_BLOCKS, BLOCK_SIZE = 64, 8


class Replays:
    """What a graph does: the same work on the same memory, the result in the same place."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.num_captures += 1
        result = run().clone().fill_(float("nan"))

        def replay() -> None:
            self.num_replays += 1
            result.copy_(run())

        return replay, result


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Layers in one group, and in two: Gemma's first two have a window."""
    model = TinyModel(architecture=request.param, num_layers=2 if request.param == "llama" else 3)
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", model)
    options = {"dtype": "float32", "attention": "triton", "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return load_model(WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), **options))


def generations(loaded: LoadedModel, lens: list[int]) -> list[Generation]:
    """One prompt each, of outputs so long: sequences leave the batch one after another."""
    capacity = [len(prompt) + length for prompt, length in zip(PROMPTS, lens, strict=True)]
    tables = blocks_for(capacity, BLOCK_SIZE, NUM_BLOCKS)
    params = [SamplingParams(seed=1, max_tokens=length, temperature=0.8, top_k=20) for length in lens]
    num_groups = len(loaded.cache.spec.groups)
    return [Generation(*parts, num_groups=num_groups) for parts in zip(PROMPTS, params, tables, strict=True)]


def outputs(loaded: LoadedModel, runner: ModelRunner, lens: list[int]) -> list[list[int]]:
    batch = generations(loaded, lens)
    run_all(runner, batch, 64)
    return [generation.output for generation in batch]


def test_replayed_steps_give_the_tokens_of_launched_ones_as_the_batch_shrinks(loaded: LoadedModel) -> None:
    lens = [2, 3, 4, 6, 7]
    launched = outputs(loaded, loaded.runner, lens)
    capture = Replays()
    graphs = DecodeGraphs(loaded.model, loaded.cache, 8, 256, capture)
    runner = ModelRunner(loaded.model, loaded.cache, loaded.device, graphs)
    fill(loaded.cache, float("nan"))
    assert outputs(loaded, runner, lens) == launched
    assert capture.num_captures == graphs.num_graphs == 4  # 8, 4, 2 and 1 sequences
    assert capture.num_replays == 6


def test_steps_of_short_sequences_are_recorded_before_anybody_waits_and_write_nothing(loaded: LoadedModel) -> None:
    capture = Replays()
    graphs = DecodeGraphs(loaded.model, loaded.cache, 3, 256, capture)
    runner = ModelRunner(loaded.model, loaded.cache, loaded.device, graphs)
    fill(loaded.cache, 7.0)
    runner.warm_up()
    assert capture.num_captures == graphs.num_graphs == 3  # 1, 2 and 3 sequences
    assert blocks_hold(loaded.cache, list(range(NUM_BLOCKS)), 7.0)


class FailsOnce(Replays):
    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self.num_captures == 1:
            self.num_captures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(run)


def test_a_step_that_could_not_be_recorded_is_launched_from_then_on(loaded: LoadedModel) -> None:
    num_groups = len(loaded.cache.spec.groups)
    plan = [ScheduledSequence(idx, (5 + idx,), 3, ((idx,),) * num_groups) for idx in range(2)]
    batches = build_batches(plan, num_groups, BLOCK_SIZE)

    def logits(capture: Replays) -> list[torch.Tensor]:
        graphs = DecodeGraphs(loaded.model, loaded.cache, 2, 32, capture)
        fill(loaded.cache, 0.5)
        if isinstance(capture, FailsOnce):
            graphs.warm_up()  # of one row it works, of two it does not
        return [graphs.run(torch.tensor([5, 6]), batches).clone() for _ in range(2)]

    with torch.inference_mode():
        capture = FailsOnce()
        launched, replayed = logits(capture), logits(Replays())
    assert all(torch.equal(*pair) for pair in zip(launched, replayed, strict=True))
    assert (capture.num_captures, capture.num_replays) == (2, 0)  # the failed one was not tried again


def test_all_recorded_steps_leave_their_logits_in_one_tensor(loaded: LoadedModel) -> None:
    """At 256 rows and 128,000 words each graph's own would be 131 MB."""
    seen: set[int] = set()

    def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        logits = run()
        seen.add(logits.untyped_storage().data_ptr())
        return lambda: None, logits

    with torch.inference_mode():
        DecodeGraphs(loaded.model, loaded.cache, 2, 256, capture).warm_up()
    assert len(seen) == 1


def test_rows_without_a_sequence_write_nothing(loaded: LoadedModel) -> None:
    runner = ModelRunner(
        loaded.model,
        loaded.cache,
        loaded.device,
        DecodeGraphs(loaded.model, loaded.cache, 8, 256, Replays()),
    )
    fill(loaded.cache, -7.0)
    batch = generations(loaded, [3] * 5)
    run_all(runner, batch, 64)
    used = {block for generation in batch for block in generation.block_table}
    unused = [block for block in range(NUM_BLOCKS) if block not in used]
    assert blocks_hold(loaded.cache, unused, -7.0)


@pytest.mark.parametrize(("max_num_seqs", "max_len"), [(4, 256), (8, 30)])
def test_steps_beyond_the_limits_are_launched(loaded: LoadedModel, max_num_seqs: int, max_len: int) -> None:
    """Five sequences at first; the longest is 39 tokens long."""
    lens = [2, 2, 2, 3, 3]
    capture = Replays()
    graphs = DecodeGraphs(loaded.model, loaded.cache, max_num_seqs, max_len, capture)
    runner = ModelRunner(loaded.model, loaded.cache, loaded.device, graphs)
    assert outputs(loaded, runner, lens) == outputs(loaded, loaded.runner, lens)
    assert capture.num_replays == 1  # the last step, of two sequences


def test_a_step_whose_layers_somebody_waits_for_is_launched(loaded: LoadedModel) -> None:
    capture = Replays()
    graphs = DecodeGraphs(loaded.model, loaded.cache, 8, 256, capture)
    runner = ModelRunner(loaded.model, loaded.cache, loaded.device, graphs)
    heard: list[int] = []
    generation = generations(loaded, [2] * 5)[1]
    runner.run(StepPlan(0, (generation.schedule(0, 20),)), heard.append)
    assert heard == list(range(1, loaded.spec.num_layers + 1))
    assert capture.num_replays == 0


@pytest.mark.parametrize(("architecture", "is_recorded"), [("mixtral", True), ("gpt_oss", False)])
def test_a_mixture_is_recorded_unless_its_experts_are_looked_up_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, is_recorded: bool
) -> None:
    """What torch does for the experts of one step it would do for those of no other; a GPU refuses to record it."""
    capture = Replays()
    monkeypatch.setattr(TritonDevice, "new_capture", lambda device: capture)
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    options = {"dtype": "float32", "attention": "triton", "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    loaded = load_model(WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), **options))
    batch = generations(loaded, [2] * 5)
    run_all(loaded.runner, batch, 64)
    assert all(len(generation.output) == 2 for generation in batch)
    assert (capture.num_captures > 0) == is_recorded
