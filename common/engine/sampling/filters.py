"""min_p, top_k and top_p on one row of logits after temperature, in this order (vLLM's), each on what is left.

A filter keeps every token at or above a threshold value, so a row's result depends on nothing but its values: tokens
that tie with the last one kept are kept too. Rows shrink at once: what follows costs by the tokens left.
"""

import math

import torch

from common.values.request import SamplingParams

Row = tuple[torch.Tensor, torch.Tensor]  # logits [num_left] and their token ids [num_left]


def has_filters(params: SamplingParams) -> bool:
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def apply_filters(row: Row, params: SamplingParams, total: float | None = None) -> Row:
    """The tokens that may be drawn. The best token always stays. No logit may be NaN.

    A row may lack tokens that its filters would drop; when top_p is the only one, `total` is then the log of the sum of
    exponentials with them.
    """
    if params.min_p > 0.0:
        row = _keep_from(row, row[0].max() + math.log(params.min_p))
    if 0 < params.top_k < row[0].shape[0]:
        row = _keep_from(row, row[0].topk(params.top_k, sorted=False).values.min())
    if params.top_p < 1.0:
        row = _keep_top_p(row, params.top_p, row[0].logsumexp(0) if total is None else torch.tensor(total))
    return row


def _keep_from(row: Row, threshold: torch.Tensor) -> Row:
    kept = (row[0] >= threshold).nonzero().squeeze(1)
    return row[0].index_select(0, kept), row[1].index_select(0, kept)


def _keep_top_p(row: Row, top_p: float, total: torch.Tensor) -> Row:
    """Keep the shortest list of best tokens whose probabilities reach `top_p`.

    Tokens below (1 - top_p) / n are less than 1 - top_p even all together, so none of them is in that list: the sort
    is of the rest, some hundreds instead of the whole vocabulary.
    """
    margin = 1.0  # rounding must not cut a token that belongs, nor must cutting twice
    row = _keep_from(row, total + (math.log((1.0 - top_p) / row[0].shape[0]) - margin))
    best = row[0].sort(descending=True).values
    cumulative = (best - total).exp().cumsum(0)
    num_kept = (cumulative < top_p).sum() + 1
    return _keep_from(row, best[num_kept.clamp(max=best.shape[0]) - 1])
