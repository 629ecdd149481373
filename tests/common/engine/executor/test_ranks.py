"""A worker of several ranks: its tokens are those of one process, and no rank is lost in silence or left behind."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.checkpoint import CheckpointError
from common.engine.contract.collectives import RankLost
from common.engine.contract.executor import ExecutorEvent, LayerComputed, StepFailed, StepFinished
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.engine.executor.local import LocalExecutor
from common.engine.executor.rank_channel import Step, decode, encode_step
from common.engine.executor.ranks import BEATS_PER_LEASE
from common.engine.loading import LoadedModel, load_model, refit
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.caches import planes_of
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.tiny_model import TinyModel, write_tiny_model
from tests.waiting import until

MODEL = TinyModel(num_heads=9, num_kv_heads=3, num_layers=3)
TABLE = (3, 1, 6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ranks") / "m", MODEL)


def config_of(path: Path, width: int, **fields: Any) -> WorkerConfig:
    model = ModelConfig(path=str(path))
    settings = {"dtype": "float32", "num_blocks": 64, "num_threads": 1, "tensor_parallel_size": width} | fields
    return WorkerConfig(role="decode", worker_id="d", model=model, **settings)


@pytest.fixture(scope="module")
def one(path: Path) -> LoadedModel:
    return load_model(config_of(path, 1))


@pytest.fixture(scope="module", params=[2, 3], ids=lambda width: f"{width} ranks")
def several(path: Path, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    with closing(load_model(config_of(path, request.param))) as loaded:
        yield loaded


def generations(block_size: int = 16, num_blocks: int = 64) -> list[Generation]:
    prompts = [[(7 * idx + at * at) % 250 for at in range(5 + 11 * idx)] for idx in range(4)]
    params = [
        SamplingParams(seed=idx, max_tokens=12, temperature=0.8 * (idx % 2), frequency_penalty=0.1) for idx in range(4)
    ]
    tables = blocks_for([len(prompt) + 12 for prompt in prompts], block_size, num_blocks)
    return [Generation(*each) for each in zip(prompts, params, tables, strict=True)]


def prefill(step_id: int = 1, num_tokens: int = 20, is_sampled: bool = False) -> StepPlan:
    sample = SampleSpec(0, 0, SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    tokens = tuple(range(5, 5 + num_tokens))
    return StepPlan(step_id, (ScheduledSequence(1, tokens, 0, (TABLE,), (sample,) * is_sampled),))


def test_greedy_and_drawn_tokens_are_those_of_one_process(one: LoadedModel, several: LoadedModel) -> None:
    batches = [generations() for _ in range(2)]
    for loaded, batch in zip((one, several), batches, strict=True):
        run_all(loaded.runner, batch, 16)
    ours, expected = ([each.output for each in batch] for batch in batches)
    assert ours == expected
    assert len({tuple(tokens) for tokens in ours}) == 4


def test_every_rank_has_written_the_layers_that_are_reported(several: LoadedModel) -> None:
    """Looked at from here while the step runs: the caches of all ranks are in memory that this process sees."""
    assert several.shards is not None
    seen: list[tuple[int, bool]] = []
    for cache in several.shards.caches:
        for plane in planes_of(cache):
            plane.zero_()

    def hook(num_layers: int) -> None:
        assert several.shards is not None
        planes = [plane for cache in several.shards.caches for plane in planes_of(cache)]
        seen.append((num_layers, all(bool(plane[:num_layers, TABLE[0]].any((1, 2, 3)).all()) for plane in planes)))

    several.runner.run(prefill(), hook)
    assert seen == [(1, True), (2, True), (3, True)]


def test_block_copies_are_made_on_every_rank(several: LoadedModel) -> None:
    several.runner.run(prefill())
    several.runner.run(StepPlan(2, (), block_copies=((0, TABLE[0], 9),)))
    assert several.shards is not None
    for cache in several.shards.caches:
        for plane in planes_of(cache):
            assert plane[:, 9].any()
            assert plane[:, 9].equal(plane[:, TABLE[0]])


def test_the_fingerprint_is_that_of_the_whole_model(one: LoadedModel, several: LoadedModel) -> None:
    assert several.fingerprint == one.fingerprint
    assert several.handoff_cache.spec == one.cache.spec
    assert several.cache.spec != one.cache.spec


def test_another_block_size_is_taken_by_every_rank(path: Path) -> None:
    with closing(load_model(config_of(path, 2))) as loaded:
        before = [each.output for each in run(loaded, generations())]
        other = refit(loaded, config_of(path, 2, block_size=32, num_blocks=40))
        assert other.cache.num_blocks == (40,)
        assert [each.output for each in run(other, generations(32, 40))] == before


async def is_silent(loaded: LoadedModel, limit_s: float) -> bool:
    return loaded.ranks_silent_s[2] > limit_s


async def test_every_rank_is_told_of_with_its_silence(one: LoadedModel, path: Path) -> None:
    assert (one.rank_pids, one.ranks_silent_s) == ((os.getpid(),), ())
    with closing(load_model(config_of(path, 3))) as loaded:
        assert loaded.others is not None
        assert loaded.rank_pids == (os.getpid(), *loaded.others.pids)
        os.kill(loaded.others.pids[1], signal.SIGSTOP)
        try:
            beats_s = 3 * config_of(path, 3).lease_s / BEATS_PER_LEASE
            await until(partial(is_silent, loaded, beats_s))
            assert len(loaded.ranks_silent_s) == 3
            assert loaded.ranks_silent_s[0] == 0.0 <= loaded.ranks_silent_s[1] < loaded.ranks_silent_s[2]
        finally:
            os.kill(loaded.others.pids[1], signal.SIGCONT)


def run(loaded: LoadedModel, batch: list[Generation]) -> list[Generation]:
    run_all(loaded.runner, batch, 16)
    return batch


def test_cache_memory_is_counted_for_the_rank_that_holds_most(path: Path) -> None:
    """Of three KV heads one rank has two."""
    with closing(load_model(config_of(path, 2, num_blocks=0, kv_cache_bytes=1 << 20))) as loaded:
        assert loaded.shards is not None
        sizes = [cache.nbytes for cache in loaded.shards.caches]
    assert sizes[1] == 2 * sizes[0]
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    assert (1 << 20) - block_bytes < sizes[1] <= 1 << 20


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "stands still")])
def test_a_rank_that_dies_or_freezes_is_reported_and_ends_the_others(
    path: Path, number: signal.Signals, said: str
) -> None:
    with closing(load_model(config_of(path, 3, lease_s=1.0))) as loaded:
        assert loaded.others is not None
        lost: queue.Queue[RankLost] = queue.Queue()
        loaded.others.on_lost(lost.put)
        processes = [psutil.Process(pid) for pid in loaded.others.pids]
        os.kill(loaded.others.pids[1], number)
        assert f"rank 2 (process {loaded.others.pids[1]}) {said}" in str(lost.get(timeout=60))
        assert not any(process.is_running() for process in processes)
        with pytest.raises(RankLost):
            loaded.runner.run(prefill())
        late: list[RankLost] = []
        loaded.others.on_lost(late.append)
        assert late


def test_a_step_that_a_lost_rank_leaves_unfinished_fails(path: Path) -> None:
    """It is frozen first, so that the step waits for it; then it dies."""
    events: queue.Queue[ExecutorEvent] = queue.Queue()
    with closing(load_model(config_of(path, 2))) as loaded:
        assert loaded.others is not None
        os.kill(loaded.others.pids[0], signal.SIGSTOP)
        executor = LocalExecutor(loaded.runner, events.put)
        executor.submit(prefill(), reports_layers=True)
        os.kill(loaded.others.pids[0], signal.SIGKILL)
        assert events.get(timeout=60) == StepFailed(1, "RankLost")
        executor.close()
        assert executor.join(60)


def test_a_step_through_the_executor_ends_as_with_one_rank(several: LoadedModel) -> None:
    events: queue.Queue[ExecutorEvent] = queue.Queue()
    executor = LocalExecutor(several.runner, events.put)
    executor.submit(prefill(7, is_sampled=True), reports_layers=True)
    found = [events.get(timeout=60) for _ in range(4)]
    assert found[:3] == [LayerComputed(7, layers, several.runner.rank) for layers in (1, 2, 3)]
    assert isinstance(found[3], StepFinished)
    assert [result.error for result in found[3].result.results] == [None]


def test_a_model_that_cannot_be_split_is_refused_before_any_process_starts(path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(CheckpointError, match="query heads are too few"):
        load_model(config_of(path, 10))
    assert psutil.Process().children() == before


def test_weights_that_cannot_be_had_are_refused_and_no_process_is_left(tmp_path: Path) -> None:
    """Both have none of the operators that so few bits need; which is heard first is left open. No process is left."""
    path = write_tiny_model(tmp_path / "m", MODEL)
    before = psutil.Process().children()
    with pytest.raises(CheckpointError, match="int8"):
        load_model(config_of(path, 2, quantization="int8"))
    assert psutil.Process().children() == before


PARENT = """
import sys, time
from tests.common.engine.executor.test_ranks import config_of, load_model
from pathlib import Path
loaded = load_model(config_of(Path(sys.argv[1]), 3))
print(*loaded.others.pids, flush=True)
time.sleep(600)
"""


def test_no_rank_outlives_rank_0(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids: list[str] = []
        while len(pids) != 2:  # above it the ranks log that they are ready
            line = parent.stdout.readline()
            assert line, "it ended"
            pids = line.split() if not line.startswith("{") else []
        ranks = [psutil.Process(int(pid)) for pid in pids]
        parent.kill()
        assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_a_plan_arrives_as_it_was_but_for_what_rank_0_draws() -> None:
    spec = SampleSpec(0, 3, SamplingParams(seed=9, max_tokens=5, logit_bias=((4, 1.0),)), token_ids=(1, 2))
    drafts = ScheduledSequence(3, (9, 8), 17, ((4, 0), (2,)), (spec, spec, spec), (5, 6))
    plan = StepPlan(12, (drafts, ScheduledSequence(4, (1,), 0, ((7,), (1,)))), ((0, 3, 4), (1, 5, 6)))
    step = decode(encode_step(plan))
    assert isinstance(step, Step)
    arrived = step.plan()
    assert (arrived.step_id, arrived.block_copies) == (plan.step_id, plan.block_copies)
    for ours, sent in zip(arrived.sequences, plan.sequences, strict=True):
        for name in ScheduledSequence.__slots__:
            if name != "samples":
                assert getattr(ours, name) == getattr(sent, name)
        assert ours.num_logits == sent.num_logits
