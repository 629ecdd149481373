"""The sequences of a beam search: they wait for one another, fork and end, as `beam_search` decides. Pure: no IO.

Each beam is a sequence. One that has its candidates is parked until all have theirs; then each parent goes on as its
first child, the other children are forks that share its blocks, and beams without children are dropped. Nothing is told
before the end: then all tokens of the winners.
"""

from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence
from common.values.request import SampledToken, TokenEvent
from decode_worker.beam_search import BeamSearch, Candidates, Step
from decode_worker.request import DecodeRequest


def start_beams(scheduler: Scheduler, request: DecodeRequest, first: SampledToken) -> tuple[TokenEvent, ...]:
    """The prompt is computed; `first` has the candidates that follow it."""
    (prompt,) = request.sequences
    request.has_first_tokens = True
    request.beams = BeamSearch(request.work.sampling)
    prompt.choices = (0,)
    scheduler.park(prompt)
    return _advance(scheduler, request, [first.top])


def go_on(
    scheduler: Scheduler, request: DecodeRequest, sequence: Sequence, token: SampledToken
) -> tuple[TokenEvent, ...]:
    """One beam has its candidates. The winners' tokens, when the search has ended with that."""
    scheduler.park(sequence)
    request.candidates[sequence.sequence_id] = token.top
    if len(request.candidates) < len(request.sequences):
        return ()
    candidates = [request.candidates.pop(each.sequence_id) for each in request.sequences]
    return _advance(scheduler, request, candidates)


def _advance(scheduler: Scheduler, request: DecodeRequest, candidates: list[Candidates]) -> tuple[TokenEvent, ...]:
    assert request.beams is not None
    steps = request.beams.advance(candidates)
    if not steps:
        return _end(scheduler, request)
    parents = {step.parent_idx for step in steps}
    for idx, sequence in enumerate(request.sequences):
        if idx not in parents:
            scheduler.drop(sequence)
    children = _children(scheduler, request, steps)
    for sequence, step in zip(children, steps, strict=True):
        sequence.token_ids.append(step.token_id)
        scheduler.resume(sequence)
    request.sequences = children
    return ()


def _children(scheduler: Scheduler, request: DecodeRequest, steps: tuple[Step, ...]) -> list[Sequence]:
    """One sequence per step, still without its token."""
    priority, order, _ = request.sequences[0].rank
    kept = {request.sequences[step.parent_idx].choices[0] for step in steps}
    free = [number for number in range(len(steps)) if number not in kept]
    children: list[Sequence] = []
    for step in steps:
        parent = request.sequences[step.parent_idx]
        if parent not in children:
            children.append(parent)
        else:
            number = free.pop(0)
            children.append(scheduler.fork(parent, number, (priority, order, number)))
    return children


def _end(scheduler: Scheduler, request: DecodeRequest) -> tuple[TokenEvent, ...]:
    assert request.beams is not None
    for sequence in request.sequences:
        scheduler.drop(sequence)
    winners = request.beams.best(max(request.live_choices) + 1)
    choices, request.sequences, request.live_choices = sorted(request.live_choices), [], set()
    return tuple(
        TokenEvent(choice, position, token, reason if position == len(tokens) - 1 else None)
        for choice in choices
        for tokens, reason in [winners[choice]]
        for position, token in enumerate(tokens)
    )
