"""A model that computes nothing is found before it serves."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError
from common.engine.contract.executor import LayerHook
from common.engine.contract.plan import SequenceResult, StepPlan, StepResult
from common.engine.executor.self_test import self_test
from common.engine.loading import load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.ranks import WHOLE
from tests.tiny_model import write_tiny_model


class Scripted:
    rank = WHOLE

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        self.plans.append(plan)
        return StepResult(plan.step_id, (SequenceResult(0, error=self.error),), 0.0)


def test_it_is_one_token_in_the_first_block_so_that_any_cache_holds_it() -> None:
    runner = Scripted(None)
    self_test(runner, 2)
    (sequence,) = runner.plans[0].sequences
    assert (sequence.token_ids, sequence.block_tables) == ((0,), ((0,), (0,)))


def test_what_cannot_be_sampled_from_is_refused() -> None:
    with pytest.raises(CheckpointError, match="sampled from: not finite"):
        self_test(Scripted("not finite"), 1)


def test_a_checkpoint_with_weights_that_are_not_numbers_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, file, {"format": "pt"})
    config = WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), num_blocks=1, block_size=1)
    with pytest.raises(CheckpointError, match="nothing that can be sampled"):
        load_model(config)
