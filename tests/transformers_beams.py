"""The oracle for beam search: that of transformers."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from common.values.request import EarlyStopping, SamplingParams

_EARLY: dict[EarlyStopping, bool | str] = {
    EarlyStopping.TRUE: True,
    EarlyStopping.FALSE: False,
    EarlyStopping.NEVER: "never",
}


def beams(path: Path, prompt: Sequence[int], params: SamplingParams, num_returned: int) -> list[list[int]]:
    """The best, in float32, without what transformers fills shorter ones with. Skips the test without transformers."""
    found = _model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.num_beams,
        num_return_sequences=num_returned,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY[params.early_stopping],
        max_new_tokens=params.max_tokens,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
    )
    return [_cut(row[len(prompt) :].tolist(), params) for row in found]


@lru_cache(maxsize=1)
def _model(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _cut(token_ids: list[int], params: SamplingParams) -> list[int]:
    ends = [idx for idx, token_id in enumerate(token_ids) if token_id in params.stop_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids
