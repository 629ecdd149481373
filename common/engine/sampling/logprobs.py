"""Log probabilities of drawn tokens and of the most likely ones."""

from collections.abc import Sequence

import torch

from common.engine.contract.plan import SampleSpec

# Of one row: the drawn token's logprob, and (token id, logprob) of the best, best first.
RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, specs: Sequence[SampleSpec]) -> dict[int, RowLogprobs]:
    """Row -> its logprobs, for the rows whose params ask. Of `logits` [num_rows, vocab_size] as they are."""
    rows = [row for row, spec in enumerate(specs) if spec.params.num_logprobs_needed is not None]
    if not rows:
        return {}
    logprobs = logits[rows].log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1).tolist()
    num_best = max(specs[row].params.num_logprobs_needed or 0 for row in rows)
    values, ids = logprobs.topk(min(num_best, logits.shape[1]))
    best = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return {row: (chosen[at], best[at][: specs[row].params.num_logprobs_needed or 0]) for at, row in enumerate(rows)}
