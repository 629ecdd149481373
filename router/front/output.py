"""From the events of a request to the updates that both APIs write: its tokens as text, choice by choice."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import assert_never

from common.values.errors import DeadlineExceeded, PdserveError
from common.values.request import PromptLogprobs, TokenEvent
from router.core.generation import Accepted, Failed, Finished, RequestTimings, Tokens
from router.front.best_choices import BestChoices
from router.front.in_flight import Entry, InFlight
from router.front.merge import merged
from router.front.service_protocol import GenerationService
from router.request.validation import ValidRequest
from router.tenants.tenants import Lease
from router.text.calls.choice import FormattedChoice
from router.text.choice_text import ChoiceDelta, ChoiceText, HiddenChoice
from router.text.token_text import TokenTexts

# The service ends a request at its deadline by itself; this is for one that does not.
_DEADLINE_SLACK_S = 0.2


@dataclass(frozen=True, slots=True)
class Deltas:
    """News of one step, of one or more choices."""

    deltas: tuple[ChoiceDelta, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Last update of a request: every choice has ended. `num_completion_tokens` counts what was generated for
    the client: choices that were not among the best, too."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    timings: RequestTimings


# PromptLogprobs: of the next prompt tokens; the last before the first Deltas.
Update = Accepted | PromptLogprobs | Deltas | Summary


class RequestOutput:
    """The choices of one request as far as they have come."""

    def __init__(self, request: ValidRequest, token_texts: TokenTexts, service: GenerationService) -> None:
        self._request_id = request.generation.request_id
        self._num_prompt_tokens = len(request.generation.token_ids)
        self._service = service
        context, has_output = request.generation.token_ids[-8:], request.generation.has_output
        self._choices: list[ChoiceText | HiddenChoice] = [
            ChoiceText(idx, token_texts, context, request.text) if has_output else HiddenChoice(idx)
            for idx in range(request.generation.num_choices)
        ]
        form, num_choices = request.form, len(self._choices)
        self._formatted = (
            [] if form is None else [FormattedChoice(form, f"{self._request_id}/{idx}") for idx in range(num_choices)]
        )
        num_best = request.generation.num_best
        self._best = None if num_best is None else BestChoices(num_choices, num_best)
        self.accepted: Accepted | None = None

    def push(self, events: Sequence[TokenEvent]) -> tuple[ChoiceDelta, ...]:
        """Take the tokens of a step; a choice that meets a stop string is stopped in the service too.

        Nothing is told before the end where only the best choices are wanted.
        """
        deltas = []
        for event in events:
            delta = self._choices[event.choice_idx].push(event)
            if delta is None:
                continue
            deltas.append(self._told_apart(delta))
            if delta.end is not None and delta.end.stop_string is not None and event.finish_reason is None:
                self._service.stop_choice(self._request_id, event.choice_idx)
        return self._wanted(deltas)

    def finished(self, finished: Finished) -> list[Update]:
        """The last updates. Raises when the service says "finished" and a choice has no end: an empty success is no
        success."""
        if not all(choice.is_ended for choice in self._choices):
            raise PdserveError("the request ended without all of its output")
        return [*self._of_best(), self._summary(finished.num_cached_tokens, finished.timings)]

    def unfinished(self, entry: Entry) -> list[Update]:
        """What to say when the service stops without a word: an abort has an end, anything else is an error."""
        if entry.error is not None:
            raise entry.error
        if not entry.is_aborted:
            raise PdserveError("the request ended without an outcome")
        ends = [self._told_apart(delta) for choice in self._choices if (delta := choice.abort()) is not None]
        deltas = self._wanted(ends)
        num_cached_tokens = self.accepted.num_cached_tokens if self.accepted else 0
        return [Deltas(deltas), *self._of_best(), self._summary(num_cached_tokens, RequestTimings())]

    def _wanted(self, deltas: list[ChoiceDelta]) -> tuple[ChoiceDelta, ...]:
        """What the client hears of now."""
        if self._best is None:
            return tuple(deltas)
        self._best.add(deltas)
        return ()

    def _of_best(self) -> list[Update]:
        return [] if self._best is None else [Deltas(self._best.deltas())]

    def _told_apart(self, delta: ChoiceDelta) -> ChoiceDelta:
        return self._formatted[delta.choice_idx].apply(delta) if self._formatted else delta

    def _summary(self, num_cached_tokens: int, timings: RequestTimings) -> Summary:
        num_completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Summary(self._num_prompt_tokens, num_completion_tokens, num_cached_tokens, timings)


class Answers:
    """The way from a valid request to its updates. Stateless: everything of a request is in its generator."""

    def __init__(self, service: GenerationService, in_flight: InFlight, token_texts: TokenTexts) -> None:
        self._service = service
        self._in_flight = in_flight
        self._token_texts = token_texts

    @asynccontextmanager
    async def run_all(
        self, requests: Sequence[ValidRequest]
    ) -> AsyncIterator[AsyncGenerator[tuple[int, Update], None]]:
        """The prompts of one call, as `run`, with their indices. All have a place before the first is submitted."""
        lengths = [len(request.generation.token_ids) for request in requests]
        with ExitStack() as held:
            leases = [held.enter_context(lease) for lease in requests[0].tenant.take_places(lengths)]
            async with aclosing(merged(list(map(self.run, requests, leases, count())))) as updates:
                yield updates

    async def run(
        self, request: ValidRequest, lease: Lease | None = None, index: int = 0
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """Submit and follow a request to its end, in the place that it has or takes. `index` comes with its updates.

        Raises PdserveError; leaving early cancels it.
        """
        generation, tenant = request.generation, request.tenant
        error = _deadline_exceeded(generation.deadline_s)
        limit_s = generation.deadline_s + _DEADLINE_SLACK_S
        with (
            lease or tenant.take_places([len(generation.token_ids)])[0] as place,
            self._in_flight.enter(generation.request_id, tenant.name, limit_s, error) as entry,
        ):
            output = RequestOutput(request, self._token_texts, self._service)
            async for event in self._service.submit(generation):
                match event:
                    case Tokens():
                        place.charge(len(event.tokens))
                        if deltas := output.push(event.tokens):
                            yield index, Deltas(deltas)
                    case Accepted():
                        output.accepted = event
                        place.placed()
                        yield index, event
                    case PromptLogprobs():
                        yield index, event
                    case Finished():
                        for update in output.finished(event):
                            yield index, update
                        return
                    case Failed():
                        _check_aborted(event, entry, generation.deadline_s)
                    case _:
                        assert_never(event)
            for update in output.unfinished(entry):
                yield index, update


def _check_aborted(failed: Failed, entry: Entry, deadline_s: float) -> None:
    """Raises what a failure means to the client, unless it has ended the request itself."""
    if isinstance(failed.error, DeadlineExceeded):
        raise entry.error or _deadline_exceeded(deadline_s)
    if not entry.is_aborted:
        raise entry.error or failed.error


def _deadline_exceeded(deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request did not end within {deadline_s:g} s: the deadline that its client stated "
        "(x-request-timeout-s, in gRPC the call's own), else router.default_deadline_s"
    )
