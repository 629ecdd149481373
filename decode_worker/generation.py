"""From sampled tokens to token events, forks and ends of choices. Pure: no IO.

Owns the numbering of sequences. The attempt's record and the scheduler's places are changed together, here.
"""

from collections.abc import Mapping

from common.values.request import SampledToken, TokenEvent
from decode_worker.attempt import Attempt
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence


class Generation:
    """Starts, advances and ends the choices of attempts."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self._scheduler = scheduler
        self._num_sequences = 0

    def start_prompt(self, attempt: Attempt, block_table: tuple[int, ...], num_computed: int) -> Sequence:
        """One sequence for the prompt that all choices share; `block_table` becomes the scheduler's, as USED."""
        self._num_sequences += 1
        sequence = Sequence(
            sequence_id=self._num_sequences,
            work=attempt.work,
            choices=attempt.work.choices,
            rank=(attempt.work.priority, attempt.order, 0),
            hash_root=attempt.hash_root,
            token_ids=list(attempt.work.token_ids),
            hashes=list(attempt.hashes),
            block_table=block_table,
            num_computed=num_computed,
        )
        attempt.sequences = [sequence]
        self._scheduler.add(sequence)
        return sequence

    def start_choices(self, attempt: Attempt, tokens: Mapping[int, SampledToken]) -> tuple[TokenEvent, ...]:
        """The prompt is computed and each choice has its first token: one sequence per choice that goes on."""
        (prompt,) = attempt.sequences
        choices = [choice for choice in attempt.work.choices if choice in attempt.live_choices]
        events = tuple(prompt.next_event(choice, tokens[choice]) for choice in choices)
        attempt.live_choices = {event.choice_idx for event in events if event.finish_reason is None}
        attempt.has_first_tokens = True
        going_on = [choice for choice in choices if choice in attempt.live_choices]
        if not going_on:
            self._scheduler.drop(prompt)
            attempt.sequences = []
            return events
        forks = [self._fork(attempt, prompt, choice) for choice in going_on[1:]]
        prompt.choices = (going_on[0],)
        attempt.sequences = [prompt, *forks]
        for sequence in attempt.sequences:
            sequence.token_ids.append(tokens[sequence.choices[0]].token_id)
        return events

    def append(self, attempt: Attempt, sequence: Sequence, token: SampledToken) -> TokenEvent:
        """The next token of one choice; a choice that is finished leaves at once."""
        event = sequence.next_event(sequence.choices[0], token)
        if event.finish_reason is None:
            sequence.token_ids.append(token.token_id)
        else:
            self.end_choices(attempt, {event.choice_idx})
        return event

    def end_choices(self, attempt: Attempt, choices: set[int]) -> None:
        """No more tokens of `choices`. The prompt's sequence goes only with the last choice that wants it."""
        attempt.live_choices -= choices
        for sequence in tuple(attempt.sequences):
            if attempt.live_choices.isdisjoint(sequence.choices):
                self._scheduler.drop(sequence)
                attempt.sequences.remove(sequence)

    def _fork(self, attempt: Attempt, prompt: Sequence, choice: int) -> Sequence:
        self._num_sequences += 1
        rank = (attempt.work.priority, attempt.order, attempt.work.choices.index(choice))
        return self._scheduler.fork(prompt, self._num_sequences, choice, rank)
