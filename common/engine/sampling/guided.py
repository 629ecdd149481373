"""Rows whose output follows a grammar: what does not fit is out before anything else is done to the row."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.plan import SampleSpec
from common.guided.masks import GrammarFailed, Masks

# By row: the tokens that fit [vocab_size], or why there is none.
Allowed = Mapping[int, npt.NDArray[np.bool_] | str]


class GuidedRows:
    """Computes the masks of a step while the model runs: the library does without the interpreter's lock.

    Owns the masks and the thread that they belong to. `open_masks` is called when the first grammar comes.
    """

    def __init__(self, open_masks: Callable[[], Masks]) -> None:
        self._open_masks = open_masks

    def start(self, specs: Sequence[SampleSpec]) -> Callable[[], Allowed]:
        """Call what it returns for the result."""
        rows = {row: spec for row, spec in enumerate(specs) if spec.params.grammar}
        if not rows:
            return dict
        return self._thread.submit(self._compute, rows).result

    def _compute(self, rows: Mapping[int, SampleSpec]) -> Allowed:
        return {row: self._allowed(spec) for row, spec in rows.items()}

    def _allowed(self, spec: SampleSpec) -> npt.NDArray[np.bool_] | str:
        try:
            return self._masks.allowed(spec.params.grammar, spec.token_ids[spec.num_prompt_tokens :])
        except GrammarFailed as error:
            return str(error)

    @cached_property
    def _masks(self) -> Masks:
        return self._open_masks()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")


def within_grammars(logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """`logits` [num_rows, vocab_size], or a copy in which tokens that do not fit are -inf."""
    masks = {row: mask for row, mask in allowed.items() if not isinstance(mask, str)}
    if not masks:
        return logits
    logits = logits.clone()
    for row, mask in masks.items():
        logits[row].masked_fill_(torch.from_numpy(~mask).to(logits.device), float("-inf"))
    return logits
