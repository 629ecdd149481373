"""What int8 and int4 weights cost in quality: every token of the golden answers, predicted from the true ones."""

import json
from typing import Any, cast

import pytest
import torch

from common.checkpoint.demo_model import fetch_demo_model
from common.engine.devices.cpu.native.ops import native_ops
from common.engine.loading import load_model
from common.values.config import ModelConfig, Quantization, WorkerConfig
from tests.common.engine.model.batches import Run, batch_of
from tests.paths import GOLDEN_FILE

pytestmark = pytest.mark.model

GOLDEN: list[dict[str, Any]] = json.loads(GOLDEN_FILE.read_text())
CASES = [case for case in GOLDEN if len(case["prompt_token_ids"]) <= 256]
BLOCKS = tuple(range(40))
# share of the reference's greedy tokens that come first here too, and nats that the others' likelihood may lose
BOUNDS = {"none": (0.97, 0.01), "int8": (0.93, 0.02), "int4": (0.93, 0.02)}  # the file has 4 bits


@pytest.mark.parametrize("quantization", BOUNDS)
def test_the_reference_tokens_stay_the_likely_ones(quantization: str) -> None:
    found = native_ops()
    if found is None or found.products is None:
        pytest.skip("no C++ compiler, or no AVX512-BF16")
    num_same, losses, num_tokens = 0, 0.0, 0
    config = WorkerConfig(
        role="decode", worker_id="d", model=ModelConfig(path=str(fetch_demo_model(print))), dtype="bfloat16",
        attention="cpu", num_blocks=len(BLOCKS), quantization=cast(Quantization, quantization),
    )  # fmt: skip
    loaded = load_model(config)
    for case in CASES:
        prompt, output = case["prompt_token_ids"], case["output_token_ids"]
        token_ids = torch.tensor(prompt + output[:-1])
        batch = batch_of([Run(0, len(token_ids), BLOCKS)], 16)
        rows = torch.arange(len(prompt) - 1, len(token_ids))
        with torch.inference_mode():
            logits = loaded.model.forward(token_ids, loaded.cache.by_layer([batch]), loaded.cache.layers, rows)
        num_same += int((logits.argmax(-1) == torch.tensor(output)).sum())
        likelihoods = logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]
        losses += float((torch.tensor(case["logprobs"]) - likelihoods).sum())
        num_tokens += len(output)
    least_same, most_lost = BOUNDS[quantization]
    print(f"{quantization}: {num_same / num_tokens:.3f} the same, {losses / num_tokens:.4f} nats lost")
    assert num_same / num_tokens >= least_same
    assert losses / num_tokens <= most_lost
