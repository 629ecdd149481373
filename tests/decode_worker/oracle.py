"""Speculation that knows the answers, and is wrong as often as it is told: for worlds whose texts do not repeat."""

import random

from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence
from decode_worker.drafting.speculation import Speculation
from tests.simkit.fake_engine import expected_output


class Oracle(Speculation):
    """Each draft is right with `share_right`; some reach beyond the end of the choice."""

    def __init__(self, rng: random.Random, share_right: float = 0.8, max_draft_tokens: int = 6) -> None:
        super().__init__(max_draft_tokens)
        self._rng = rng
        self._share_right = share_right
        self._most = max_draft_tokens

    def fill(self, scheduler: Scheduler) -> None:
        for sequence in scheduler.in_step:
            if sequence.num_scheduled == 1 and len(sequence.token_ids) > len(sequence.work.token_ids):
                scheduler.draft(sequence, self._drafts(sequence))

    def _drafts(self, sequence: Sequence) -> list[int]:
        (choice,) = sequence.choices
        output = expected_output(sequence.work, choice)
        following = [*output[len(sequence.token_ids) - len(sequence.work.token_ids) :], 7, 8, 9]
        drafts = following[: self._rng.randint(0, self._most)]
        return [token if self._rng.random() < self._share_right else (token + 1) % 50 for token in drafts]
