"""What a request has given so far: its tokens as text, choice by choice, and the updates that both APIs write."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.values.errors import PdserveError
from common.values.request import PromptLogprobs, TokenEvent
from router.core.generation import Accepted, Finished, RequestTimings
from router.front.best_choices import BestChoices
from router.front.in_flight import Entry
from router.front.service_protocol import GenerationService
from router.request.validation import ValidRequest
from router.text.calls.choice import FormattedChoice
from router.text.choice_text import ChoiceDelta, ChoiceText, HiddenChoice
from router.text.token_text import TokenTexts


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
