"""Forms of an answer that no scripted conversation reaches."""

import pytest

from common.values.request import SampledToken
from router.front.openai.render import CompletionRenderer, RenderOptions, WholeChoice
from router.front.scored_prompt import ScoredPrompt
from router.text.token_text import TokenTexts
from tests.router.text.tokenizers_for_tests import byte_tokenizer

A, B, C = (byte_tokenizer().token_to_id(letter) for letter in "abc")
NO_TEXT = (100_000, 100_001)  # beyond the tokenizer's vocabulary


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (SampledToken(C, -3.0, ((A, -0.1), (B, -2.0))), {"a": -0.1, "b": -2.0, "c": -3.0}),
        (SampledToken(B, -2.0, ((A, -0.1), (B, -2.0))), {"a": -0.1, "b": -2.0}),
        (SampledToken(A, -0.1, ((NO_TEXT[0], -1.0), (NO_TEXT[1], -2.0))), {"": -1.0, "a": -0.1}),
        (SampledToken(NO_TEXT[1], -2.0, ((NO_TEXT[0], -1.0), (A, -1.5))), {"": -2.0, "a": -1.5}),
    ],
)
def test_the_top_logprobs_of_a_completion_hold_the_token_itself(
    token: SampledToken, expected: dict[str, float]
) -> None:
    """Wherever it ranks, as OpenAI's do. Tokens of equal text: its own number, else the best."""
    renderer = CompletionRenderer(RenderOptions(True, 2), TokenTexts(byte_tokenizer()))
    choice = renderer.whole(WholeChoice(0, ScoredPrompt(()), tokens=[token], offsets=[0]))
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [expected]
