"""Rows whose output follows a grammar: what does not fit is out before anything else is done to the row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        runs = list(_runs(specs))
        if not runs:
            return dict
        return self._thread.submit(self._compute, runs).result

    def _compute(self, runs: Sequence[tuple[int, Sequence[SampleSpec]]]) -> Allowed:
        return {first + idx: mask for first, run in runs for idx, mask in enumerate(self._allowed(run))}

    def _allowed(self, run: Sequence[SampleSpec]) -> list[npt.NDArray[np.bool_] | str]:
        """One for each. What follows a draft that does not fit is never drawn: its row says so."""
        first, last = run[0], run[-1]
        output, drafts = first.token_ids[first.num_prompt_tokens :], last.token_ids[len(first.token_ids) :]
        try:
            masks = self._masks.allowed_along(first.params.grammar, output, drafts)
        except GrammarFailed as error:
            return [str(error)] * len(run)
        return [*masks, *["behind a draft that does not fit"] * (len(run) - len(masks))]

    @cached_property
    def _masks(self) -> Masks:
        return self._open_masks()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")


def _runs(specs: Sequence[SampleSpec]) -> Iterator[tuple[int, Sequence[SampleSpec]]]:
    """(first row, rows) of each output under a grammar: several rows are its last token and the drafts after it."""
    first = 0
    while first < len(specs):
        last = first + 1
        while last < len(specs) and _follows(specs[last], specs[last - 1]):
            last += 1
        if specs[first].params.grammar:
            yield first, specs[first:last]
        first = last


def _follows(spec: SampleSpec, before: SampleSpec) -> bool:
    """Whether `spec` is of the same output as `before`, one token later."""
    is_next = spec.params is before.params and spec.position == before.position + 1
    return is_next and spec.choice_idx == before.choice_idx and spec.token_ids[:-1] == before.token_ids


def within_grammars(logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """`logits` [num_rows, vocab_size], or a copy in which tokens that do not fit are -inf."""
    masks = {row: mask for row, mask in allowed.items() if not isinstance(mask, str)}
    if not masks:
        return logits
    logits = logits.clone()
    for row, mask in masks.items():
        logits[row].masked_fill_(torch.from_numpy(~mask).to(logits.device), float("-inf"))
    return logits
