"""What chaos clients ask, and what the reference answers: of a tiny model in any number, of the demo model some."""

import random
from collections.abc import Iterable
from pathlib import Path

from common.checkpoint import open_checkpoint
from tests.chaos.ledger import Question
from tests.cluster.golden import load_goldens
from tests.cluster.load import VOCAB, Case
from tests.tiny_model import tiny_tokenizer

NUM_QUESTIONS = 40
SHORTEST_GOLDEN = 20


def make_questions(model: Path, cases: Iterable[Case]) -> list[Question]:
    """Asks the reference; some milliseconds per token of a tiny model."""
    return _worded(model, [(case, tuple(case.expected(model)[0])) for case in cases])


def questions_for_chaos(model: Path, seed: int) -> list[Question]:
    return make_questions(model, mixed_cases(NUM_QUESTIONS, seed, longest_prompt=900, longest_output=160))


def golden_questions(model: Path) -> list[Question]:
    """The prompts whose greedy answers by another implementation are kept, to their last token; long enough ones."""
    return _worded(
        model,
        [
            (Case(tuple(golden.prompt_token_ids), 0, 0.0, len(golden.output_token_ids)), tuple(golden.output_token_ids))
            for golden in load_goldens()
            if len(golden.output_token_ids) >= SHORTEST_GOLDEN
        ],
    )


def _worded(model: Path, answers: Iterable[tuple[Case, tuple[int, ...]]]) -> list[Question]:
    tokenizer = open_checkpoint(model).tokenizer()
    return [
        Question(case, expected, tokenizer.decode(list(expected), skip_special_tokens=True))
        for case, expected in answers
    ]


def mixed_cases(count: int, seed: int, *, longest_prompt: int = 200, longest_output: int = 120) -> list[Case]:
    """Prompts of which half begin like another one; short and long answers.

    A prompt ends in a whole character, else the first bytes of the answer could complete it.
    """
    rng = random.Random(seed)
    last = tiny_tokenizer().encode("a", add_special_tokens=False).ids
    prefixes = [rng.choices(VOCAB, k=longest_prompt // 2) for _ in range(max(1, count // 8))]
    cases = []
    for idx in range(count):
        shared = rng.choice(prefixes) if idx % 2 else []
        own = rng.choices(VOCAB, k=rng.randint(1, max(1, longest_prompt - len(shared))))
        temperature = rng.choice((0.0, 1.0))
        num_tokens = rng.randint(max(1, longest_output // 4), longest_output)
        cases.append(Case((*shared, *own, *last), rng.randrange(1 << 40), temperature, num_tokens))
    return cases
