"""Log probabilities of a prompt's own tokens and of the most likely ones in their places.

Logits come for a whole chunk; what is computed from them is computed a few rows at a time, so it takes no second matrix
of that size, and only numbers that are told are kept.
"""

import math
from collections.abc import Iterator

import torch

from common.engine.contract.plan import ScoreSpec
from common.engine.sampling.sampler import SampleError
from common.values.request import PromptLogprobs

# Rows at a time: 32 of a vocabulary of 150,000 are 19 MB.
_NUM_ROWS = 32


def prompt_logprobs(logits: torch.Tensor, spec: ScoreSpec) -> PromptLogprobs | SampleError:
    """Of `logits` [num_scored, vocab_size] float32, as they are; row i predicts token i of `spec`."""
    logprobs: list[float] = []
    ranks: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for rows, token_ids in _parts(logits, spec.token_ids):
        total = rows.logsumexp(dim=1, keepdim=True)
        own = rows.gather(1, token_ids.unsqueeze(1))
        best = rows.topk(min(spec.num_top, rows.shape[1]), dim=1)
        logprobs += (own - total).squeeze(1).tolist()
        ranks += (rows > own).sum(dim=1).add_(1).tolist()
        top_ids += best.indices.flatten().tolist()
        top_logprobs += (best.values - total).flatten().tolist()
    if not all(map(math.isfinite, logprobs)):
        return SampleError("logits are not finite")
    return PromptLogprobs(spec.start, tuple(logprobs), tuple(ranks), tuple(top_ids), tuple(top_logprobs))


def _parts(logits: torch.Tensor, token_ids: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return zip(torch.split(logits, _NUM_ROWS), torch.split(wanted, _NUM_ROWS), strict=True)
