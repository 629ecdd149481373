"""From sampled tokens to token events, forks and ends of choices: a request and its sequences change together. Pure."""

from collections.abc import Mapping
from collections.abc import Sequence as Many

from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import BlockTableSet, Sequence
from common.values.request import SampledToken, TokenEvent
from decode_worker.request import DecodeRequest


def start_prompt(scheduler: Scheduler, request: DecodeRequest, block_tables: BlockTableSet, num_computed: int) -> None:
    """One sequence for the prompt that all choices share; `block_tables` become the scheduler's, as USED."""
    rank = (request.work.priority, request.order, 0)
    request.sequences = [scheduler.add(request.work, request.hashes, rank, block_tables, num_computed)]


def start_choices(
    scheduler: Scheduler, request: DecodeRequest, tokens: Mapping[int, SampledToken]
) -> tuple[TokenEvent, ...]:
    """The prompt is computed and each choice has its first token: one sequence per choice that goes on."""
    (prompt,) = request.sequences
    choices = [choice for choice in request.work.choices if choice in request.live_choices]
    events = tuple(prompt.next_event(choice, tokens[choice]) for choice in choices)
    request.live_choices = {event.choice_idx for event in events if event.finish_reason is None}
    request.has_first_tokens = True
    going_on = [choice for choice in choices if choice in request.live_choices]
    if not going_on:
        scheduler.drop(prompt)
        request.sequences = []
        return events
    forks = [_fork(scheduler, request, prompt, choice) for choice in going_on[1:]]
    prompt.choices = (going_on[0],)
    request.sequences = [prompt, *forks]
    for sequence in request.sequences:
        sequence.token_ids.append(tokens[sequence.choices[0]].token_id)
    return events


def append(
    scheduler: Scheduler, request: DecodeRequest, sequence: Sequence, run: Many[SampledToken]
) -> tuple[TokenEvent, ...]:
    """The next tokens of one choice: accepted drafts and the one behind them. A choice that is finished leaves at once,
    and what comes behind its end is dropped."""
    events: list[TokenEvent] = []
    for token in run:
        events.append(sequence.next_event(sequence.choices[0], token))
        if events[-1].finish_reason is not None:
            break
        sequence.token_ids.append(token.token_id)
    if sequence.draft_token_ids:
        scheduler.settle(sequence, len(events) - 1)
    if events[-1].finish_reason is not None:
        end_choices(scheduler, request, {events[-1].choice_idx})
    return tuple(events)


def end_choices(scheduler: Scheduler, request: DecodeRequest, choices: set[int]) -> None:
    """No more tokens of `choices`. The prompt's sequence goes only with the last choice that wants it."""
    request.live_choices -= choices
    for sequence in tuple(request.sequences):
        if request.live_choices.isdisjoint(sequence.choices):
            scheduler.drop(sequence)
            request.sequences.remove(sequence)


def _fork(scheduler: Scheduler, request: DecodeRequest, prompt: Sequence, choice: int) -> Sequence:
    rank = (request.work.priority, request.order, request.work.choices.index(choice))
    return scheduler.fork(prompt, choice, rank)
