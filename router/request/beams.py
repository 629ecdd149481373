"""What a request states of a beam search, and what does not go with one. Pure: no IO. Ranges are left to `validation`.

A search takes the most likely tokens and draws none, so whatever shapes a draw has no meaning in it.
"""

from typing import Any

from common.values.request import EarlyStopping
from router.request.spec import RequestSpec, Stated

# Values besides None that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
    "stop": ("", []),
}
_EARLY = {None: EarlyStopping.FALSE, False: EarlyStopping.FALSE, True: EarlyStopping.TRUE, "never": EarlyStopping.NEVER}


def misfit(spec: RequestSpec, grammar: str) -> tuple[str, str] | None:
    """(field, problem) of the first thing stated that does not fit: `grammar` is what the output is held to."""
    stated = spec.stated
    if not stated.use_beam_search:
        return _idle(stated)
    if not spec.is_whole:
        return "use_beam_search", "is not available with stream: which beams win shows at the end"
    if grammar:
        return "use_beam_search", "does not go with a constrained output, or with calls that must be made"
    for field, neutral in _NEUTRAL.items():
        value = getattr(stated, field)
        if value is not None and value not in neutral:
            return field, "does not go with use_beam_search, which draws no tokens"
    return None


def fields_of(stated: Stated, num_beams: int) -> dict[str, Any]:
    """Of `SamplingParams`. Nothing is drawn, whatever the model's authors advise."""
    penalty = 1.0 if stated.length_penalty is None else float(stated.length_penalty)
    early = _EARLY[stated.early_stopping]
    return {"temperature": 0.0, "num_beams": num_beams, "length_penalty": penalty, "early_stopping": early}


def _idle(stated: Stated) -> tuple[str, str] | None:
    """A field of a search where there is none."""
    if stated.length_penalty not in (None, 1):
        return "length_penalty", "is only allowed with use_beam_search"
    if stated.early_stopping not in (None, False):
        return "early_stopping", "is only allowed with use_beam_search"
    return None
